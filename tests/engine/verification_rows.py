"""Steps whose rows hold one token of the sequence, known or in flight, and drafts behind it."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from infermix.engine.runner import ModelRunner
from infermix.roles.decoder import Want
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.roles.scheduler import Plan, Scheduled
from torch import Tensor

VOCAB = range(6, 96)
ALL = Want(all_logits=True)


@dataclass
class Rows:
    """`entries` are ready to run; `texts[i]` is everything that row i stands for, drafts included."""

    entries: list[Scheduled]
    texts: list[list[int]]
    query_len: int

    def expected(self, model: Any) -> Tensor:
        """The model's own logits of every new token, `[rows * query_len, V]` fp32 on the CPU."""
        with torch.no_grad():
            logits = [model(torch.tensor([text])).logits[0, -self.query_len :] for text in self.texts]
        return torch.cat(logits)


def reference_model(directory: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def rows_of(engine: Any, contexts: Many[int | None], query_len: int, in_flight: Many[bool], seed: int = 0) -> Rows:
    """Sequences of an idle engine with so many tokens in the KV; `None` leaves a hole where rows are fixed."""
    rng = random.Random(seed)
    entries, texts, holes = [], [], []
    for number, context in enumerate(contexts):
        text = [rng.choice(VOCAB) for _ in range((context or 1) + query_len)]
        seq = _computed(engine, number, text[: context or 1])
        if context is None:
            holes.append(seq.seq_id)
            continue
        _give_next(engine, seq, text[context], in_flight[number % len(in_flight)])
        assert engine._space.reserve(seq.seq_id, len(text))
        entries.append(Scheduled(seq, query_len, tuple(text[context + 1 :])))
        texts.append(text)
    for seq_id in holes:
        engine._space.release(seq_id)
    return Rows(entries, texts, query_len)


def _computed(engine: Any, number: int, tokens: list[int]) -> Sequence:
    """A sequence whose tokens are all in the KV, in lane `number`."""
    request = Request(request_id=str(number), prompt_ids=tuple(tokens), sampling=SamplingParams(max_new_tokens=64))
    seq = Sequence(number, request, list(tokens), len(tokens), lane=number)
    assert engine._space.reserve(number, len(tokens))
    graphs, engine._runner.graphs = engine._runner.graphs, None
    engine._runner.forward(Plan([Scheduled(seq, len(tokens))]))
    engine._runner.graphs = graphs
    seq.num_computed = len(tokens)
    return seq


def _give_next(engine: Any, seq: Sequence, token: int, in_flight: bool) -> None:
    if in_flight:
        seq.num_inflight = 1
        engine._runner._next_ids[seq.lane] = token
    else:
        seq.tokens.append(token)
        engine._runner._next_ids[seq.lane] = 0


def run(runner: ModelRunner, rows: Rows) -> Tensor:
    """Logits of every new token in the order of `rows.entries`, fp32 on the CPU; checks whose rows came back."""
    forward = runner.forward(Plan(list(rows.entries)), ALL)
    lanes = forward.lanes.tolist()
    assert lanes == [seq.lane for seq in forward.sequences]
    place = {entry.sequence.lane: number for number, entry in enumerate(rows.entries)}
    assert sorted(lanes) == sorted(lane for lane in place for _ in range(rows.query_len))
    order = sorted(range(len(lanes)), key=lambda row: place[lanes[row]])
    return forward.logits.float().cpu()[order]
