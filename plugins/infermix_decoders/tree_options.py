"""Options of decoders whose draft heads come from a checkpoint and make trees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from infermix.errors import UserError
from infermix.roles.component import Options
from infermix.roles.decoder import DecoderOptions
from msgspec import Meta

Heads = Annotated[
    str,
    Meta(
        min_length=1,
        description="folder of the draft heads, relative to the experiment: config.json and safetensors, as "
        "published or as `infermix train-heads` writes them",
    ),
]
TreeTokens = Annotated[
    int, Meta(ge=1, le=63, description="guesses in the tree, verified together per step", extra={"unit": "tokens"})
]


class HeadsOptions(DecoderOptions, frozen=True, kw_only=True):
    heads: Heads

    def check(self, base: Path) -> None:
        """That a folder of heads is there; what is in it is read when the decoder is built."""
        path = base / self.heads / "config.json"
        if not path.is_file():
            hint = "infermix train-heads writes such a folder"
            raise UserError("there is no such file", where=str(path), key="heads", hint=hint)


class MedusaOptions(HeadsOptions, frozen=True, kw_only=True):
    num_draft_tokens: TreeTokens = 31
    acceptance: Annotated[
        Literal["exact", "typical"],
        Meta(
            description="exact: the very tokens of plain decoding; typical: for sampled requests, guesses stay that "
            "the target finds likely enough (lossy)"
        ),
    ] = "exact"
    epsilon: Annotated[float, Meta(gt=0, le=1, description="typical: this likelihood is always enough")] = 0.09
    delta: Annotated[
        float, Meta(gt=0, description="typical: enough is also this times exp(-entropy), where that is less")
    ] = 0.3


class EagleOptions(HeadsOptions, frozen=True, kw_only=True):
    num_draft_tokens: TreeTokens = 31
    depth: Annotated[int, Meta(ge=1, le=16, description="longest branch", extra={"unit": "tokens"})] = 5
    beam: Annotated[
        int, Meta(ge=1, le=32, description="guesses of a depth that are followed, and that each of them gets")
    ] = 8


class MedusaTraining(Options, frozen=True, kw_only=True):
    num_heads: Annotated[int, Meta(ge=1, le=16, description="heads, one per position ahead")] = 4
    num_layers: Annotated[int, Meta(ge=1, le=4, description="residual blocks of a head")] = 1
    decay: Annotated[float, Meta(gt=0, le=1, description="weight of a head's loss against the one before it")] = 0.8


class EagleTraining(Options, frozen=True, kw_only=True):
    feature_weight: Annotated[
        float, Meta(ge=0, description="of the loss on hidden states against that on tokens")
    ] = 0.2
    own_features: Annotated[
        float, Meta(ge=0, description="weight of a second pass that reads the first one's guesses, as drafting does")
    ] = 0.5
