"""From what calibration saw to one fixed scale per input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from infermix.toolkit.linears import FoundLinear
from torch import Tensor

from infermix_quant.linear_int8 import INT8_MAX, round_int8
from infermix_quant.observe import InputGroup
from infermix_quant.observers import ObserverChoice, RoundAt, choose_peak


class ActivationChoice(ObserverChoice, Protocol):
    @property
    def activations(self) -> str: ...


def peaks_of(groups: Sequence[InputGroup], choice: ObserverChoice, round_at: RoundAt) -> dict[str, float]:
    """Where the range of every linear's input ends, by its name. The groups were observed with `magnitudes`."""
    peaks: dict[str, float] = {}
    for group in groups:
        assert group.magnitudes is not None
        peak = choose_peak(group.magnitudes, choice, round_at)
        peaks.update(dict.fromkeys((linear.name for linear in group.linears), peak))
    return peaks


def static_scale(peak: float, largest: float, linear: FoundLinear) -> Tensor:
    """fp32 scalar: `peak` becomes `largest`."""
    return torch.tensor(peak / largest, dtype=torch.float32, device=linear.weight.device)


def round_int8_at(values: Tensor, peak: float) -> Tensor:
    scale = torch.tensor(peak / INT8_MAX)
    return round_int8(values, scale) * scale


def described_activations(choice: ActivationChoice) -> str:
    """For the name of a method."""
    if choice.activations != "tensor":
        return {"none": "as they are", "token": "per token"}[choice.activations]
    share = f" {choice.percentile:g} %" if choice.observer == "percentile" else ""
    return f"with one static scale per input ({choice.observer}{share})"
