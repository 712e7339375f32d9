"""AWQ (Lin et al., 2023) as autoawq does it. The library is archived and needs old versions of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role
from infermix.roles.environment import Environment
from infermix.toolkit.isolated import IsolatedQuantizer
from infermix.toolkit.isolated_options import GroupSize, IsolatedOptions, described, needs_model, stored_bits
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

ENVIRONMENT = Environment(
    name="autoawq",
    summary="autoawq 0.2.9 with transformers 4.51",
    pythons=("3.11", "3.12"),
    pins=("torch==2.13.0", "numpy==2.3.5", "transformers==4.51.3", "accelerate==1.6.0", "datasets==5.0.1"),
    no_deps=("autoawq==0.2.9",),
)
#: Families that the library and our reader know.
_MODELS = frozenset({
    "bloom", "cohere", "gemma", "gemma2", "gpt_bigcode", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
})  # fmt: skip


class AutoAwqOptions(IsolatedOptions, frozen=True, kw_only=True):
    """Always 4 bits with fitted zero points: the library's checkpoint format holds nothing else."""

    group_size: GroupSize = 64
    duo_scaling: Annotated[bool, Meta(description="scales look at weights too, not at activations alone")] = True
    clip: Annotated[bool, Meta(description="shrink the range of a group where that lowers its error")] = True
    clip_tokens: Annotated[
        int, Meta(ge=1, description="tokens that the search for ranges looks at", extra={"unit": "tokens"})
    ] = 512
    parallel_samples: Annotated[
        int | None, Meta(description="samples that run together (null: all)", extra={"unit": "samples"})
    ] = None


def _build(options: AutoAwqOptions, context: None) -> Any:
    return IsolatedQuantizer(
        name="autoawq",
        method=f"autoawq {described(4, options.group_size, symmetric=False)}",
        environment=ENVIRONMENT,
        script=Path(__file__).with_name("worker.py"),
        group_size=options.group_size,
        config_form="transformers-4",
        most_perplexity_ratio=options.most_perplexity_ratio,
        options={
            "group_size": options.group_size or -1,
            "duo_scaling": options.duo_scaling,
            "clip": options.clip,
            "clip_tokens": options.clip_tokens,
            "parallel_samples": options.parallel_samples,
            "clone": True,
        },
    )


def _needs(options: AutoAwqOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return needs_model("autoawq", _MODELS, model)


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="autoawq",
            role=Role.QUANTIZER,
            summary="AWQ by the library autoawq, in an environment of its own (calibrated)",
            build=_build,
            options=AutoAwqOptions,
            environment=ENVIRONMENT,
            needs=_needs,
            lossless=lambda options: False,
            weight_bits=lambda options: stored_bits(4, options.group_size, symmetric=False),
            source="https://github.com/casper-hansen/AutoAWQ",
        )
    ]
