"""GPTQ (Frantar et al., 2022) as auto-gptq does it. The library is archived and needs old versions of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role
from infermix.roles.environment import Environment
from infermix.toolkit.isolated import IsolatedQuantizer
from infermix.toolkit.isolated_options import (
    ActOrder,
    Damping,
    GroupedOptions,
    described,
    needs_model,
    stored_bits,
)
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

ENVIRONMENT = Environment(
    name="auto-gptq",
    summary="auto-gptq 0.7.1 with transformers 4.46",
    pythons=("3.11",),
    pins=(
        "torch==2.13.0", "numpy==2.3.5", "transformers==4.46.3", "accelerate==1.2.1", "peft==0.13.2",
        "datasets==2.21.0", "gekko==1.3.3", "rouge==1.0.1", "sentencepiece==0.2.3",
    ),
    no_deps=("auto-gptq==0.7.1",),
)  # fmt: skip
#: Families that both the library and its transformers know.
_MODELS = frozenset({
    "bloom", "codegen", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "llama", "mistral", "mixtral",
    "opt", "qwen2",
})  # fmt: skip


class AutoGptqOptions(GroupedOptions, frozen=True, kw_only=True):
    act_order: ActOrder = False
    static_groups: Annotated[bool, Meta(description="fit all scales beforehand")] = False
    damping: Damping = 0.01
    true_sequential: Annotated[
        bool, Meta(description="the later linears of a layer see the inputs that its quantized ones give")
    ] = True


def _build(options: AutoGptqOptions, context: None) -> Any:
    order = " act-order" if options.act_order else ""
    static = " static groups" if options.static_groups else ""
    return IsolatedQuantizer(
        name="auto_gptq",
        method=f"auto-gptq {described(options.bits, options.group_size, symmetric=options.symmetric)}{order}{static}",
        environment=ENVIRONMENT,
        script=Path(__file__).with_name("worker.py"),
        group_size=options.group_size,
        config_form="transformers-4",
        most_perplexity_ratio=options.most_perplexity_ratio,
        options={
            "bits": options.bits,
            "group_size": options.group_size or -1,
            "sym": options.symmetric,
            "desc_act": options.act_order,
            "static_groups": options.static_groups,
            "damp_percent": options.damping,
            "true_sequential": options.true_sequential,
        },
    )


def _needs(options: AutoGptqOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return needs_model("auto-gptq", _MODELS, model)


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="auto_gptq",
            role=Role.QUANTIZER,
            summary="GPTQ by the library auto-gptq, in an environment of its own (calibrated)",
            build=_build,
            options=AutoGptqOptions,
            environment=ENVIRONMENT,
            needs=_needs,
            lossless=lambda options: False,
            weight_bits=lambda options: stored_bits(options.bits, options.group_size, symmetric=options.symmetric),
            source="https://github.com/AutoGPTQ/AutoGPTQ",
        )
    ]
