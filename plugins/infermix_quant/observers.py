"""Static activation scales: where the range of an input ends, from the magnitudes that calibration saw.

`minmax` ends it at the largest magnitude, `percentile` where a share of all values lies inside, `mse` where the
squared error of rounding and clipping is least (Nagel et al., "A White Paper on Neural Network Quantization" (2021),
section 3.1). The last two read a histogram over powers of two, which needs one pass and no range known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

#: Bins per factor of two: neighbouring bins differ by 2 %, within which an observer chooses.
_PER_OCTAVE = 32
_SMALLEST, _LARGEST = -30, 30
_CANDIDATES = 200
#: `mse` does not cut deeper than to this share of the largest magnitude.
_LEAST_SHARE = 0.01

#: `round_at(values, peak)`: the values rounded by a scale that ends at `peak`, clipped there.
RoundAt = Callable[[Tensor, float], Tensor]


class ObserverChoice(Protocol):
    """Options of a quantizer with static scales."""

    @property
    def observer(self) -> str: ...

    @property
    def percentile(self) -> float: ...


class Magnitudes:
    """Counts of |x| over bins of equal ratio; zeros and what is below 2**-30 fall into the first bin."""

    def __init__(self) -> None:
        self.counts = torch.zeros((_LARGEST - _SMALLEST) * _PER_OCTAVE, dtype=torch.float64)
        self.peak = 0.0

    def add(self, x: Tensor) -> None:
        """Counts nothing of an x that is not finite: no bin holds it, and whoever observes refuses the input."""
        magnitude = x.detach().float().abs().flatten()
        peak = float(magnitude.amax())
        if not math.isfinite(peak):
            return
        self.peak = max(self.peak, peak)
        bins = ((magnitude.clamp_min(2.0**_SMALLEST).log2() - _SMALLEST) * _PER_OCTAVE).long()
        self.counts += torch.bincount(bins.clamp_max(len(self.counts) - 1), minlength=len(self.counts)).cpu()

    def _values(self) -> Tensor:
        """The middle of every bin."""
        return torch.exp2((torch.arange(len(self.counts)) + 0.5) / _PER_OCTAVE + _SMALLEST)

    def at_percentile(self, percentile: float) -> float:
        """The smallest end of a bin below which `percentile` of all values lie, at most the largest value."""
        share = self.counts.cumsum(0) / self.counts.sum()
        index = int((share < percentile / 100 - 1e-12).sum())
        return min(self.peak, 2.0 ** ((index + 1) / _PER_OCTAVE + _SMALLEST))

    def at_least_error(self, round_at: RoundAt) -> float:
        values = self._values().clamp_max(self.peak)
        candidates = torch.linspace(_LEAST_SHARE, 1.0, _CANDIDATES) * self.peak
        errors = [
            float(((round_at(values, peak) - values).double().square() * self.counts).sum())
            for peak in candidates.tolist()
        ]
        return float(candidates[min(range(len(errors)), key=errors.__getitem__)])


def choose_peak(seen: Magnitudes, choice: ObserverChoice, round_at: RoundAt) -> float:
    """Where the range of the scale ends; positive also when all values were 0."""
    if choice.observer == "percentile":
        found = seen.at_percentile(choice.percentile)
    elif choice.observer == "mse":
        found = seen.at_least_error(round_at)
    else:
        found = seen.peak
    return max(found, 1e-30)
