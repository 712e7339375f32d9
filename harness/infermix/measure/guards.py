"""Guards: checks of the measurement itself. Each gives a verdict and a sentence.

Green: as it should be. Yellow: read the number with care. Red: the number is not what it says. `measure.guards` of
an experiment overrides the limits by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from infermix.errors import UserError, nearest
from infermix.measure import goodput
from infermix.measure.stats import drift
from infermix.record.record import GuardResult, Repeat, RequestSample, Verdict

#: Engine counters of work that belongs into set-up.
SETUP_COUNTERS = ("compiles", "autotunes", "graph_captures")

#: Engine counter of prompt tokens that were served from a cache of earlier requests, and how many of a repeat's
#: prompts may be served so because the experiment keeps the cache between repeats.
PREFIX_COUNTER = "prefix_hit_tokens"
KEPT_COUNTER = "prefix_kept_tokens"

SIGNIFICANT = 0.05


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the guards look at: the repeats as `measure_repeat` made them, so a stored record is enough.

    `concurrency` is the workload's (`None`: open loop), `steady` whether the warm-up ended in a steady rate (`None`:
    not judged).
    """

    repeats: Sequence[Repeat]
    concurrency: int | None = None
    device: str = "cpu"
    steady: bool | None = None

    @property
    def samples(self) -> list[RequestSample]:
        return [sample for repeat in self.repeats for sample in repeat.requests]

    def environment(self, key: str) -> list[float]:
        """One value per repeat that has it."""
        return [repeat.environment[key] for repeat in self.repeats if key in repeat.environment]

    def counter(self, name: str) -> float:
        return sum(repeat.environment.get("counters", {}).get(name, 0) for repeat in self.repeats)


Check = Callable[[Evidence, float], GuardResult | None]


@dataclass(frozen=True)
class Guard:
    """`check` returns `None` when it has nothing to look at. `limit` is the default."""

    name: str
    limit: float
    unit: str
    doc: str
    check: Check = field(compare=False)


def run_guards(evidence: Evidence, limits: Mapping[str, float] | None = None) -> list[GuardResult]:
    """The verdict of every guard that applies. Raises `UserError` for a limit of an unknown guard."""
    overrides = limits or {}
    check_guard_names(overrides)
    results = (guard.check(evidence, overrides.get(guard.name, guard.limit)) for guard in GUARDS)
    return [result for result in results if result is not None]


def check_guard_names(limits: Iterable[str]) -> None:
    """Raises `UserError` with the nearest name."""
    for name in limits:
        if name not in GUARD_LIMITS:
            raise UserError(
                f"there is no guard {name!r}",
                key=f"measure.guards.{name}",
                hint=nearest(name, GUARD_LIMITS),
            )


def _result(name: str, verdict: Verdict, value: float, limit: float, detail: str) -> GuardResult:
    return GuardResult(name=name, verdict=verdict, detail=detail, value=value, limit=limit)


def _graded(name: str, value: float, limit: float, red_above: float, detail: str) -> GuardResult:
    """Green up to `limit`, yellow up to `red_above`, red beyond."""
    verdict: Verdict = "green" if value <= limit else "yellow" if value <= max(limit, red_above) else "red"
    return _result(name, verdict, value, limit, detail)


def setup_in_window(evidence: Evidence, limit: float) -> GuardResult:
    counts = {name: evidence.counter(name) for name in SETUP_COUNTERS}
    total = sum(counts.values())
    detail = ", ".join(f"{count:g} {name}" for name, count in counts.items() if count) or "none"
    return _graded("setup_in_window", total, limit, limit, f"set-up work inside the measured repeats: {detail}")


def prefix_hits(evidence: Evidence, limit: float) -> GuardResult:
    """Red for hits that the prompts of one repeat do not explain; yellow where the experiment keeps earlier ones."""
    hits = evidence.counter(PREFIX_COUNTER)
    shareable = sum(evidence.environment("shareable_tokens"))
    beyond = max(0.0, hits - shareable)
    detail = f"{hits:g} prompt tokens came from a prefix cache; the prompts of the repeats share {shareable:g}"
    if evidence.counter(KEPT_COUNTER):
        detail += "; the experiment keeps the cache between repeats"
        return _graded("prefix_hits", beyond, limit, max(limit, evidence.counter(KEPT_COUNTER)), detail)
    return _graded("prefix_hits", beyond, limit, limit, detail)


def input_length(evidence: Evidence, limit: float) -> GuardResult | None:
    return _lengths(evidence, "input_length", "inputs_off", "prompts", limit)


def output_length(evidence: Evidence, limit: float) -> GuardResult | None:
    return _lengths(evidence, "output_length", "outputs_off", "outputs", limit)


def _lengths(evidence: Evidence, name: str, key: str, what: str, limit: float) -> GuardResult | None:
    wrong, total = evidence.environment(key), len(evidence.samples)
    if not wrong or not total:
        return None
    detail = f"{sum(wrong):g} of {total} {what} have another length than asked"
    return _graded(name, sum(wrong) / total, limit, limit, detail)


def failed_share(evidence: Evidence, limit: float) -> GuardResult | None:
    samples = evidence.samples
    if not samples:
        return None
    bad = [sample for sample in samples if goodput.failed(sample)]
    reason = next((f", the first: {sample.error}" for sample in bad if sample.error), "")
    detail = f"{len(bad)} of {len(samples)} requests failed{reason}"
    return _graded("failed_share", len(bad) / len(samples), limit, 0.01, detail)


def generator_late(evidence: Evidence, limit: float) -> GuardResult | None:
    """Not judged where everything arrives at once: there is no schedule to keep."""
    if evidence.concurrency is None and _offline(evidence):
        return None
    late = [_p99([sample.late_s for sample in repeat.requests]) for repeat in evidence.repeats]
    worst = max(late)
    detail = f"99 % of requests were sent within {worst * 1000:.2f} ms of their turn"
    return _graded("generator_late", worst, limit, 5 * limit, detail)


def generator_late_gap(evidence: Evidence, limit: float) -> GuardResult | None:
    if evidence.concurrency is not None:
        return None
    shares = [share for repeat in evidence.repeats if (share := _late_over_gap(repeat)) is not None]
    if not shares:
        return None
    detail = f"99 % of requests were sent within {max(shares):.1%} of a mean gap between arrivals"
    return _graded("generator_late_gap", max(shares), limit, 5 * limit, detail)


def _late_over_gap(repeat: Repeat) -> float | None:
    arrivals = sorted(sample.arrival_s for sample in repeat.requests)
    if len(arrivals) < 2 or arrivals[-1] == arrivals[0]:
        return None
    gap = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)
    return _p99([sample.late_s for sample in repeat.requests]) / gap


def _p99(values: Sequence[float]) -> float:
    """The smallest value that 99 % do not exceed."""
    ordered = sorted(values)
    return ordered[-(-99 * len(ordered) // 100) - 1] if ordered else 0.0


def few_repeats(evidence: Evidence, limit: float) -> GuardResult:
    repeats = len(evidence.repeats)
    verdict: Verdict = "green" if repeats >= limit else "yellow"
    return _result("few_repeats", verdict, repeats, limit, f"{repeats} measured repeats, {limit:g} wanted")


def unsteady(evidence: Evidence, limit: float) -> GuardResult | None:
    if evidence.steady is None:
        return None
    value = 0.0 if evidence.steady else 1.0
    detail = "the warm-up ended in a steady rate" if evidence.steady else "the rate still moved after the warm-up"
    return _graded("unsteady", value, limit, 1.0, detail)


def rate_drift(evidence: Evidence, limit: float) -> GuardResult | None:
    """Open loop fixes the rate, so the latency is watched there."""
    name, values = _watched(evidence)
    line = drift(values)
    if line is None:
        return None
    moved = abs(line.change) if line.p_value < SIGNIFICANT else 0.0
    detail = f"{name} changed by {line.change:+.1%} over {len(values)} repeats (p = {line.p_value:.2g})"
    return _graded("rate_drift", moved, limit, 3 * limit, detail)


def _watched(evidence: Evidence) -> tuple[str, list[float]]:
    if evidence.concurrency is not None or _offline(evidence):
        totals = [sum(map(goodput.output_tokens, repeat.requests)) for repeat in evidence.repeats]
        rates = zip(totals, evidence.repeats, strict=True)
        return "output tokens per s", [total / repeat.wall_s for total, repeat in rates if repeat.wall_s > 0]
    ends = [[e for s in repeat.requests if (e := goodput.e2e_s(s)) is not None] for repeat in evidence.repeats]
    return "mean end-to-end latency", [fmean(values) for values in ends if values]


def _offline(evidence: Evidence) -> bool:
    return all(sample.arrival_s == 0 for sample in evidence.samples)


def cpu_wait(evidence: Evidence, limit: float) -> GuardResult | None:
    shares = evidence.environment("cpu_wait_share")
    if not shares:
        return None
    detail = f"our threads waited for a core up to {max(shares):.1%} of the time they wanted one"
    return _graded("cpu_wait", max(shares), limit, 4 * limit, detail)


def load_average(evidence: Evidence, limit: float) -> GuardResult | None:
    loads, cores = evidence.environment("load_average"), evidence.environment("num_cores")
    if evidence.device != "cpu" or not loads or not cores:
        return None
    per_core = max(load / count for load, count in zip(loads, cores, strict=True))
    detail = f"load average {max(loads):.2f} on {cores[0]:g} cores"
    return _graded("load_average", per_core, limit, 2 * limit, detail)


def swap(evidence: Evidence, limit: float) -> GuardResult | None:
    swapped = evidence.environment("swap_bytes")
    if not swapped:
        return None
    detail = f"{sum(swapped) / 2**20:.1f} MiB were swapped during the repeats"
    return _graded("swap", sum(swapped), limit, 16 * limit, detail)


def thermal_throttle(evidence: Evidence, limit: float) -> GuardResult | None:
    share = _throttled(evidence, "thermal")
    if share is not None:
        detail = f"the device was thermally throttled {share:.1%} of the time"
        return _graded("thermal_throttle", share, limit, 5 * limit, detail)
    events = evidence.environment("thermal_events")
    if evidence.device != "cpu" or not events:
        return None
    detail = f"{sum(events):g} thermal throttle events of the processor"
    return _graded("thermal_throttle", min(1.0, sum(events)), limit, 1.0, detail)


def power_throttle(evidence: Evidence, limit: float) -> GuardResult | None:
    """A power cap is how a device is sold, so it is never worse than yellow."""
    share = _throttled(evidence, "power")
    if share is None:
        return None
    detail = f"the power cap lowered the clocks {share:.1%} of the time"
    return _graded("power_throttle", share, limit, 1.0, detail)


def _throttled(evidence: Evidence, policy: str) -> float | None:
    found = [repeat.environment.get("throttled_share", {}).get(policy) for repeat in evidence.repeats]
    return max((share for share in found if share is not None), default=None)


def device_shared(evidence: Evidence, limit: float) -> GuardResult | None:
    if not evidence.device.startswith("cuda"):
        return None
    others = evidence.environment("other_processes")
    if not others:
        reasons = {repeat.environment.get("nvml_error", "NVML was not read") for repeat in evidence.repeats}
        detail = f"could not be checked: {'; '.join(sorted(reasons))}"
        return GuardResult(name="device_shared", verdict="yellow", detail=detail, limit=limit)
    detail = f"{max(others):g} other processes used the device"
    return _graded("device_shared", max(others), limit, limit, detail)


GUARDS: tuple[Guard, ...] = (
    Guard("setup_in_window", 0, "events", "compiling, autotuning or graph capture in a repeat", setup_in_window),
    Guard("prefix_hits", 0, "tokens", "cached prompt tokens beyond what the prompts share", prefix_hits),
    Guard("input_length", 0, "share", "prompts with another length than asked", input_length),
    Guard("output_length", 0, "share", "outputs with another length than asked", output_length),
    Guard("failed_share", 0, "share", "failed requests; red above 1 %", failed_share),
    Guard("generator_late", 0.010, "s", "99th percentile of the load generator's lateness", generator_late),
    Guard("generator_late_gap", 0.10, "share", "the same over the mean gap of arrivals", generator_late_gap),
    Guard("few_repeats", 3, "repeats", "fewest repeats for an interval worth having", few_repeats),
    Guard("unsteady", 0, "", "1 when the warm-up did not end in a steady rate", unsteady),
    Guard("rate_drift", 0.05, "share", "significant change from the first to the last repeat", rate_drift),
    Guard("cpu_wait", 0.05, "share", "time in which our threads wanted a core and had none", cpu_wait),
    Guard("load_average", 1.0, "per core", "load average over usable cores, CPU cells only", load_average),
    Guard("swap", 2**20, "bytes", "bytes swapped during the repeats", swap),
    Guard("thermal_throttle", 0.01, "share", "time in which heat lowered the clocks", thermal_throttle),
    Guard("power_throttle", 0.01, "share", "time in which the power cap lowered the clocks", power_throttle),
    Guard("device_shared", 0, "processes", "other processes on the device", device_shared),
)

#: Guards by name: what `measure.guards` may override.
GUARD_LIMITS: Mapping[str, Guard] = {guard.name: guard for guard in GUARDS}
