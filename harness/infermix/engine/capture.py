"""Which steps of an assembled engine are captured in CUDA graphs, and why others are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from infermix.engine.graphs import StepGraphs, captured
from infermix.engine.host_bound import find_host_bound
from infermix.engine.mixed_graphs import MAX_TOKENS, MixedGraphs, worthwhile_tokens
from infermix.errors import Unsupported
from infermix.roles.component import Role
from infermix.roles.decoder import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infermix.engine.assembly import Assembly
    from infermix.engine.bridge import Joint
    from infermix.engine.runner import ModelRunner
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.toolkit.selection import TokenSelector

#: Fewer tokens than this are not worth a graph of their own.
_MIN_MIXED_TOKENS = 16


def capture(
    build: Assembly,
    runner: ModelRunner,
    joint: Joint,
    shape: KVShape,
    space: KVSpace,
    next_ids: Tensor,
    selector: TokenSelector,
    query_lens: tuple[int, ...],
    trees: bool = False,
) -> dict[str, Any]:
    """Give `runner` its graphs; returns what was captured, or the reasons, for the record."""
    refusal = why_not_captured(build, space.recompute)
    if refusal:
        return {"captured": 0, "reason": refusal}
    graphs = StepGraphs(joint, shape, next_ids, build.max_num_seqs, query_lens, selector, trees)
    refusal = _captured_all(build, "capture", graphs)
    if refusal:
        return {"captured": 0, "reason": refusal}
    runner.graphs = graphs
    return {
        "captured": len(graphs.keys),
        "batches": sorted({key.batch for key in graphs.keys}),
        "query_lens": sorted({key.query_len for key in graphs.keys}),
        "contexts": sorted({key.context for key in graphs.keys}),
        "mixed": _capture_mixed(build, runner, joint, shape, space, next_ids, selector, graphs.pool),
    }


def _capture_mixed(
    build: Assembly,
    runner: ModelRunner,
    joint: Joint,
    shape: KVShape,
    space: KVSpace,
    next_ids: Tensor,
    selector: TokenSelector,
    pool: Any,
) -> dict[str, Any]:
    given = build.options.mixed_graph_tokens
    sizes = _sizes_to_try(build) if given is None else [given]
    refusal = _why_no_mixed(build, space, sizes[0])
    if refusal:
        return {"captured": 0, "reason": refusal}

    def attempt(sizes: list[int]) -> dict[str, Any]:
        mixed = MixedGraphs(joint, shape, next_ids, build.max_num_seqs, sizes[-1], selector, pool)
        bound = _limited(build, mixed, sizes)
        refusal = _captured_all(build, "capture_mixed", mixed)
        if refusal:
            return {"captured": 0, "reason": refusal}
        runner.mixed = mixed
        return {"captured": len(mixed.keys), "tokens": mixed.keys, "max_context": mixed.max_context, **bound}

    return _within_memory(attempt, sizes)


def _within_memory(attempt: Callable[[list[int]], dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Steps that nobody asked for are given up where there is no memory for them, and the record says so."""
    try:
        return attempt(sizes)
    except torch.OutOfMemoryError:
        if len(sizes) == 1:
            raise
    torch.cuda.empty_cache()
    return {**attempt(sizes[:1]), "larger": "no memory for larger steps"}


def _sizes_to_try(build: Assembly) -> list[int]:
    """Largest steps that may be worth a graph: what surely is, and its doubles up to the scheduler's largest step."""
    least = worthwhile_tokens(build.context.facts.num_parameters)
    budget = getattr(build.context.parts[Role.SCHEDULER].options, "max_num_batched_tokens", None) or least
    sizes = [least]
    while sizes[-1] < min(budget, MAX_TOKENS):
        sizes.append(min(2 * sizes[-1], budget, MAX_TOKENS))
    return sizes


def _limited(build: Assembly, mixed: MixedGraphs, sizes: list[int]) -> dict[str, Any]:
    """Keep steps that wait for the host; how that was found, for the record. Nothing to find with one size."""
    if len(sizes) == 1:
        return {}
    with torch.inference_mode():
        bound = find_host_bound(mixed.run_idle, torch.cuda.synchronize, sizes, build.context.clock_ns)
    mixed.limit(bound.tokens)
    return {"host_bound": bound.about()}


def _captured_all(build: Assembly, phase: str, graphs: StepGraphs | MixedGraphs) -> str | None:
    """Capture every step; returns why the model cannot be captured (experts picked by loops on the host, say)."""
    try:
        with torch.inference_mode():
            for done in graphs.capture_all():
                build.context.progress(phase, done)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"the model cannot be captured: {_reason(error)}"
    return None


def _reason(error: RuntimeError) -> str:
    """Once the device has done what was begun."""
    torch.cuda.synchronize()
    return str(error).splitlines()[0]


class DecoderCapture:
    """`DecoderContext.capture`: graphs of a decoder's own work, under the rules of steps.

    They have a memory pool of their own, so that neither a step nor its results lie where a decoder's replay writes.
    """

    def __init__(self, build: Assembly) -> None:
        self._refusal = why_not_captured(build, recompute=False)
        self._pool: Any = None

    def __call__(self, work: Callable[[], Any]) -> Captured:
        if self._refusal:
            raise Unsupported(self._refusal)
        try:
            with torch.inference_mode():
                graph, result = captured(work, self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Unsupported(f"the decoder's work cannot be captured: {_reason(error)}") from error
        self._pool = self._pool or graph.pool()
        return Captured(graph.replay, result)


def why_not_captured(build: Assembly, recompute: bool) -> str | None:
    if build.device.type != "cuda":
        return f"steps run eagerly on {build.device.type}"
    if build.options.graphs == "off":
        return "switched off by the experiment"
    if recompute:
        return "the KV layout recomputes everything: no two steps have the same shape"
    for choice in (*build.context.parts.values(), *build.context.transforms):
        if "graph:no" in _provided(build, choice):
            return f"{choice.component.role.value} {choice.component.name!r} cannot be captured (graph:no)"
    return None


def _why_no_mixed(build: Assembly, space: KVSpace, max_tokens: int) -> str | None:
    """Why prefill and mixed steps run eagerly although decode steps are captured."""
    if build.options.mixed_graph_tokens == 0:
        return "switched off by the experiment"
    if max_tokens < _MIN_MIXED_TOKENS:
        return f"the device takes longer for {_MIN_MIXED_TOKENS} tokens than the host for launching a step"
    if space.fixed_rows:
        return "the KV layout gives each sequence a fixed row of a captured batch"
    for role in (Role.ATTENTION, Role.KV):
        choice = build.context.parts[role]
        if "graph:mixed" not in _provided(build, choice):
            return f"{role.value} {choice.component.name!r} needs query lengths on the host (no graph:mixed)"
    return None


def _provided(build: Assembly, choice: Any) -> frozenset[str]:
    provided: frozenset[str] = choice.component.provides(choice.options, build.context.facts, build.context.machine)
    return provided
