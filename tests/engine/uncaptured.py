"""Steps of fixed shape run without capturing: everything but the graph itself, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from infermix.engine.graphs import CapturedStep, StepBuffers, StepGraphs

LANES = 6


class _Uncaptured:
    """Runs the step where a graph would be replayed."""

    def __init__(self, graphs: StepGraphs, step: CapturedStep) -> None:
        self._graphs, self._step = graphs, step

    def replay(self) -> None:
        logits, lanes, most_likely, self._step.hidden = self._graphs._step(self._step.buffers, self._step.batch)
        self._step.logits.copy_(logits)
        self._step.token_lanes.copy_(lanes)
        self._step.most_likely = most_likely


def uncaptured(engine: Any, query_lens: tuple[int, ...], trees: bool = False) -> StepGraphs:
    """`StepGraphs` whose steps are all there, without any graph."""
    next_ids, vocab = engine._runner._next_ids, engine._runner.vocab_size
    graphs = StepGraphs(engine._joint, engine._shape, next_ids, LANES, query_lens, trees=trees)
    for key in graphs.wanted:
        with_mask = trees and key.query_len > 1
        buffers = StepBuffers(key.batch, key.query_len, engine._shape, LANES, next_ids.device, with_mask)
        tokens = key.batch * key.query_len
        step = CapturedStep(
            None,  # type: ignore[arg-type]
            buffers,
            buffers.as_batch(key.context),
            torch.zeros(tokens, vocab),
            torch.zeros(tokens).long(),  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
        )
        step.graph = _Uncaptured(graphs, step)  # type: ignore[assignment]
        graphs._steps[key] = step
    return graphs
