"""Goodput: requests per second that met the stated limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from infermix.errors import UserError, nearest
from infermix.record.record import RequestSample

FAILED = frozenset({"error", "abort"})


def failed(sample: RequestSample) -> bool:
    return sample.finish_reason in FAILED


def ttft_s(sample: RequestSample) -> float | None:
    """Intended arrival to first output token of any output; `None` without output."""
    first_s = _first_s(sample)
    return None if first_s is None else first_s - sample.arrival_s


def ttft_from_send_s(sample: RequestSample) -> float | None:
    first_s = _first_s(sample)
    return None if first_s is None else first_s - sample.sent_s


def e2e_s(sample: RequestSample) -> float | None:
    """Intended arrival to the last output token of all outputs."""
    last = [output.emissions[-1][0] for output in sample.outputs if output.emissions]
    return max(last) - sample.arrival_s if last else None


def tpot_s(sample: RequestSample) -> float | None:
    """(E2E - TTFT) / (output tokens - 1); undefined for one token. Of several outputs the mean."""
    each = [_tpot_s(output.emissions) for output in sample.outputs]
    defined = [value for value in each if value is not None]
    return sum(defined) / len(defined) if defined else None


def _tpot_s(emissions: Sequence[tuple[float, int]]) -> float | None:
    tokens = sum(count for _, count in emissions)
    if tokens < 2:
        return None
    return (emissions[-1][0] - emissions[0][0]) / (tokens - 1)


def gaps_s(sample: RequestSample) -> list[float]:
    """Times between consecutive emissions of the same output."""
    return [later - earlier for output in sample.outputs for (earlier, _), (later, _) in pairwise(output.emissions)]


def output_tokens(sample: RequestSample) -> int:
    """Tokens of all its outputs."""
    return sum(tokens for output in sample.outputs for _, tokens in output.emissions)


def num_emissions(sample: RequestSample) -> int:
    return sum(len(output.emissions) for output in sample.outputs)


def _first_s(sample: RequestSample) -> float | None:
    return min((output.emissions[0][0] for output in sample.outputs if output.emissions), default=None)


def _largest_gap_s(sample: RequestSample) -> float | None:
    return max(gaps_s(sample), default=None)


#: What a request can be held to. `itl_s` bounds its largest gap. A figure that is undefined for a request (TPOT of
#: one token) does not fail it, but a request without any output never counts.
GOODPUT_LIMITS: Mapping[str, Callable[[RequestSample], float | None]] = {
    "ttft_s": ttft_s,
    "tpot_s": tpot_s,
    "itl_s": _largest_gap_s,
    "e2e_s": e2e_s,
}


def check_goodput(limits: Mapping[str, float]) -> None:
    """Raises `UserError` for a limit that does not exist."""
    for name in limits:
        if name not in GOODPUT_LIMITS:
            raise UserError(
                f"there is no goodput limit {name!r}",
                key=f"measure.goodput.{name}",
                hint=nearest(name, GOODPUT_LIMITS),
            )


def meets_limits(sample: RequestSample, limits: Mapping[str, float]) -> bool:
    """Whether a request ended well, gave output, and kept every limit (equality counts)."""
    if failed(sample) or not sample.emissions:
        return False
    values = ((GOODPUT_LIMITS[name](sample), limit) for name, limit in limits.items())
    return all(value is None or value <= limit for value, limit in values)
