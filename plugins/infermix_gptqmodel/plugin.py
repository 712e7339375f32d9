"""GPTQ (Frantar et al., 2022) and AWQ (Lin et al., 2023) as gptqmodel does them.

The library patches transformers when it is imported and asks for a newer torch than it needs on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Options, Role
from infermix.roles.environment import Environment
from infermix.toolkit.isolated import IsolatedQuantizer
from infermix.toolkit.isolated_options import (
    ActOrder,
    Damping,
    GroupedOptions,
    GroupSize,
    IsolatedOptions,
    described,
    needs_model,
    stored_bits,
)
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

ENVIRONMENT = Environment(
    name="gptqmodel",
    summary="gptqmodel 7.7.0 with transformers 5.24",
    pythons=("3.11", "3.12"),
    pins=(
        "torch==2.13.0", "numpy==2.3.5", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.1.0",
        "threadpoolctl==3.8.0", "device-smi==0.5.7", "protobuf==7.36.2", "pillow==13.0.0", "requests==2.34.2",
        "pypcre==0.6.4", "logbar==0.4.15",
    ),
    no_deps=("gptqmodel==7.7.0", "tokenicer==0.0.14", "defuser==0.0.28", "torchao==0.18.0"),
)  # fmt: skip
#: Families that the library and our reader know.
_MODELS = frozenset({
    "bloom", "codegen", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "starcoder2",
})  # fmt: skip


class GptqModelOptions(GroupedOptions, frozen=True, kw_only=True):
    act_order: ActOrder = False
    group_aware: Annotated[
        bool, Meta(description="order columns by their activations inside groups and groups as wholes")
    ] = True
    static_groups: Annotated[bool, Meta(description="fit all scales beforehand")] = False
    damping: Damping = 0.05
    true_sequential: Annotated[
        bool, Meta(description="the later linears of a layer see the inputs that its quantized ones give")
    ] = True


class GptqModelAwqOptions(IsolatedOptions, frozen=True, kw_only=True):
    """Always 4 bits with fitted zero points."""

    group_size: GroupSize = 64


def _quantizer(name: str, method: str, options: Any, half: bool, config: dict[str, Any]) -> IsolatedQuantizer:
    shared = {"group_size": options.group_size or -1, "pack_impl": "original"}
    return IsolatedQuantizer(
        name=name,
        method=method,
        environment=ENVIRONMENT,
        script=Path(__file__).with_name("worker.py"),
        group_size=options.group_size,
        most_perplexity_ratio=options.most_perplexity_ratio,
        options={"half": half, "config": {**shared, **config}},
    )


def _build_gptq(options: GptqModelOptions, context: None) -> Any:
    order = " act-order" if options.act_order else " group-aware" if options.group_aware else ""
    sizes = described(options.bits, options.group_size, symmetric=options.symmetric)
    return _quantizer("gptqmodel_gptq", f"gptqmodel gptq {sizes}{order}", options, False, {
        "bits": options.bits,
        "sym": options.symmetric,
        "desc_act": options.act_order,
        "act_group_aware": options.group_aware and not options.act_order,
        "static_groups": options.static_groups,
        "damp_percent": options.damping,
        "true_sequential": options.true_sequential,
    })  # fmt: skip


def _build_awq(options: GptqModelAwqOptions, context: None) -> Any:
    method = f"gptqmodel awq {described(4, options.group_size, symmetric=False)}"
    config = {"bits": 4, "sym": False, "quant_method": "awq", "format": "gemm"}
    return _quantizer("gptqmodel_awq", method, options, True, config)


def _needs(options: Options, model: ModelFacts, machine: MachineFacts) -> Features:
    return needs_model("gptqmodel", _MODELS, model)


def _component(name: str, what: str, build: Any, options: type[Options], bits: Any) -> Component:
    return Component(
        name=name,
        role=Role.QUANTIZER,
        summary=f"{what} by the library gptqmodel, in an environment of its own (calibrated)",
        build=build,
        options=options,
        environment=ENVIRONMENT,
        needs=_needs,
        lossless=lambda options: False,
        weight_bits=bits,
        source="https://github.com/ModelCloud/GPTQModel",
    )


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        _component(
            "gptqmodel_gptq", "GPTQ", _build_gptq, GptqModelOptions,
            lambda options: stored_bits(options.bits, options.group_size, symmetric=options.symmetric),
        ),
        _component(
            "gptqmodel_awq", "AWQ", _build_awq, GptqModelAwqOptions,
            lambda options: stored_bits(4, options.group_size, symmetric=False),
        ),
    ]  # fmt: skip
