"""What filling in masks took, from the counters of a decoder that does.

The counters of one repeat: `denoising_forwards` of the model, `denoising_steps` of sequences (as many as a forward
has of them), `unmasked_tokens` that were kept, `remasked_tokens` that were predicted and masked again,
`canvas_tokens` that went through the model, masks included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

#: Unit and direction of each figure.
DENOISING_METRICS: Mapping[str, tuple[str, Literal["higher", "lower", "none"]]] = {
    "tokens_per_denoising_step": ("tokens", "higher"),
    "tokens_per_denoising_forward": ("tokens", "higher"),
    "remasked_share": ("", "none"),
    "computed_per_unmasked_token": ("tokens", "lower"),
}


def denoising(counters: Mapping[str, float]) -> dict[str, float]:
    """The figures of one repeat; empty for a decoder that fills in no masks, or before it kept a token.

    Tokens per step are those of one sequence, per forward those of all; the share is of all predictions.
    """
    kept = counters.get("unmasked_tokens")
    if not kept:
        return {}
    again = counters["remasked_tokens"]
    return {
        "tokens_per_denoising_step": kept / counters["denoising_steps"],
        "tokens_per_denoising_forward": kept / counters["denoising_forwards"],
        "remasked_share": again / (kept + again),
        "computed_per_unmasked_token": counters["canvas_tokens"] / kept,
    }
