"""Decoders with draft heads of their own: `medusa` and `eagle`, and how their heads are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.component import Component, Features, Role
from infermix.roles.training import Trainer

from infermix_decoders.tree_options import EagleOptions, EagleTraining, MedusaOptions, MedusaTraining

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext
    from infermix.roles.facts import MachineFacts, ModelFacts
    from infermix.roles.training import HeadTraining


def _needs(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:truncate", "kv:move", "attn:tree_mask"})


def _provides(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"decoder:drafts"})


def _build_medusa(options: MedusaOptions, context: DecoderContext) -> Any:
    from infermix_decoders.build_medusa import build_medusa

    return build_medusa(options, context)


def _build_eagle(options: EagleOptions, context: DecoderContext) -> Any:
    from infermix_decoders.build_eagle import build_eagle

    return build_eagle(options, context)


def _train_medusa(options: MedusaTraining, training: HeadTraining) -> dict[str, Any]:
    from infermix_decoders.train_medusa import train_medusa

    return train_medusa(options, training)


def _train_eagle(options: EagleTraining, training: HeadTraining) -> dict[str, Any]:
    from infermix_decoders.train_eagle import train_eagle

    return train_eagle(options, training)


HEAD_COMPONENTS = (
    Component(
        name="medusa",
        role=Role.DECODER,
        summary="extra heads guess several tokens ahead, a tree of guesses is verified in one forward",
        build=_build_medusa,
        options=MedusaOptions,
        requires=("torch", "safetensors"),
        needs=_needs,
        provides=_provides,
        lossless=lambda options: options.acceptance == "exact",
        trainer=Trainer(MedusaTraining, _train_medusa),
        source="https://arxiv.org/abs/2401.10774",
    ),
    Component(
        name="eagle",
        role=Role.DECODER,
        summary="a draft layer guesses hidden states, a tree of their tokens is verified in one forward",
        build=_build_eagle,
        options=EagleOptions,
        requires=("torch", "safetensors"),
        needs=_needs,
        provides=_provides,
        trainer=Trainer(EagleTraining, _train_eagle),
        source="https://arxiv.org/abs/2406.16858",
    ),
)
