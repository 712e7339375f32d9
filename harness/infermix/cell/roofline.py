"""How far a cell is from what its machine could do: the bytes and FLOPs that its requests needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infermix.cost.kv import kv_groups
from infermix.cost.roofline import limit_fractions, phase_cost
from infermix.measure.goodput import failed, output_tokens
from infermix.record.record import Record, Repeat
from infermix.roles.component import Role

if TYPE_CHECKING:
    from infermix.compose import CellPlan
    from infermix.roles.facts import ModelFacts

#: Engine counters of forward passes: the native engine's two kinds, or `steps` of any engine.
_FORWARDS = (("eager_steps", "graph_steps"), ("steps",))


@dataclass(frozen=True)
class Work:
    """What the requests of all repeats needed. `weight_bytes` is `None` when the number of forwards is unknown."""

    flops: float
    kv_bytes: float
    weight_bytes: float | None
    seconds: float


def roofline(plan: CellPlan, record: Record) -> dict[str, Any]:
    """For `Record.roofline`: fractions of the limit and which one binds, or a `reason` why there are none.

    The work is counted as with a KV cache and one forward per step, whatever the parts really did: what a part does
    beyond that shows as a lower fraction. Prompt tokens that a prefix cache served are no work.
    """
    ceilings = plan.machine.ceilings
    if ceilings.copy_bytes_per_s is None:
        return {
            "reason": "the limits of this machine are not measured (run without --no-ceilings, or infermix doctor)"
        }
    assert plan.facts is not None
    work = _work(plan, plan.facts, record)
    if work.seconds <= 0 or work.flops <= 0:
        return {"reason": "no request succeeded"}
    num_bytes = work.kv_bytes + (work.weight_bytes or 0.0)
    figures = limit_fractions(num_bytes, work.flops, work.seconds, ceilings, plan.dtype)
    if work.weight_bytes is not None:
        return figures
    reason = "the engine does not count its forward passes, so the bytes that it read are unknown"
    return {**{key: figures[key] for key in ("flops_per_s", "mfu") if key in figures}, "reason": reason}


def _work(plan: CellPlan, facts: ModelFacts, record: Record) -> Work:
    bits = _weight_bits(plan)
    element_bytes = _kv_element_bytes(facts, record)
    shapes = _shapes(record.repeats)
    flops = kv_bytes = 0.0
    computed = _computed_share(record.repeats)
    for (prompt, output), count in shapes.items():
        prefill = phase_cost(
            facts, "prefill", batch=1, new_tokens=prompt, context=prompt, kv_element_bytes=element_bytes
        )
        flops += count * prefill.flops * computed
        kv_bytes += count * prefill.kv_bytes
        if output > 1:
            # Cost is linear in the context, so one step at the mean context stands for all.
            middle = prompt + output // 2
            step = phase_cost(facts, "decode", batch=1, new_tokens=1, context=middle, kv_element_bytes=element_bytes)
            flops += count * (output - 1) * step.flops
            kv_bytes += count * (output - 1) * step.kv_bytes
    tokens = sum(count * (prompt + output - 1) for (prompt, output), count in shapes.items())
    weights = _weight_bytes(facts, record.repeats, tokens, bits)
    return Work(flops, kv_bytes, weights, sum(repeat.wall_s for repeat in record.repeats))


def _computed_share(repeats: Iterable[Repeat]) -> float:
    """Share of the prompt tokens that were computed; the rest came from a prefix cache."""
    counters = [repeat.environment.get("counters", {}) for repeat in repeats]
    queried = sum(each.get("prefix_queried_tokens", 0) for each in counters)
    return 1 - sum(each.get("prefix_hit_tokens", 0) for each in counters) / queried if queried else 1.0


def _shapes(repeats: Iterable[Repeat]) -> Counter[tuple[int, int]]:
    """How many requests had so many prompt and output tokens."""
    return Counter(
        (sample.input_tokens, tokens)
        for repeat in repeats
        for sample in repeat.requests
        if not failed(sample) and (tokens := output_tokens(sample))
    )


def _weight_bytes(facts: ModelFacts, repeats: list[Repeat], tokens: int, bits: float | None) -> float | None:
    counts = [_forwards(repeat.environment.get("counters", {})) for repeat in repeats]
    forwards = sum(count for count in counts if count is not None)
    if None in counts or forwards <= 0:
        return None
    batch = max(1, round(tokens / forwards))
    return forwards * phase_cost(facts, "step", batch=batch, new_tokens=1, context=1, weight_bits=bits).weight_bytes


def _forwards(counters: Mapping[str, float]) -> float | None:
    for names in _FORWARDS:
        if all(name in counters for name in names):
            return sum(counters[name] for name in names)
    return None


def _weight_bits(plan: CellPlan) -> float | None:
    """Of the quantizer, or of an engine that quantizes by itself."""
    quantizer = plan.parts.get(Role.QUANTIZER, plan.engine)
    return quantizer.component.weight_bits(quantizer.options)


def _kv_element_bytes(facts: ModelFacts, record: Record) -> float | None:
    """Bytes per stored K or V value, from what the engine says a token costs."""
    per_token = record.memory.get("kv_bytes_per_token")
    values = sum(group.bytes_per_token(1.0) for group in kv_groups(facts))
    return per_token / values if per_token and values else None
