"""Lossless KV layouts under random workloads: joins, finishes, forks, preemptions and evictions leave no trace.

The yardstick is transformers' own full forward without any cache, one request at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infermix.cost.kv import layer_states, stored_groups
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.kv_space import KVBudget
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import ModelSource
from tiny_models import tiny_model

Build = Callable[..., Any]
LONGEST = 48
NEAR_TIE = 1e-3
STEMS = [[random.Random(seed).randrange(6, 96) for _ in range(24)] for seed in range(3)]

RECOMPUTE, SWAP = "recompute", "swap"
PAGED, HYBRID = {"block_size": 4}, {"block_size": 4, "max_chunk_tokens": 5}
CASES = [
    ("llama", ("paged", PAGED), RECOMPUTE),
    ("llama", ("paged", {**PAGED, "prefix_cache": "radix"}), SWAP),
    ("gemma3_text", ("hybrid", HYBRID), SWAP),
    ("deepseek_v3", ("latent", PAGED), SWAP),
    ("jamba", ("state", PAGED), SWAP),
]
SLOWER = [
    ("llama", ("dense", {}), RECOMPUTE),
    ("llama", ("paged", {**PAGED, "prefix_cache": "hash"}), RECOMPUTE),
    ("gemma3_text", ("hybrid", HYBRID), RECOMPUTE),
    ("gemma3n_text", ("paged", {**PAGED, "prefix_cache": "radix"}), RECOMPUTE),
    ("jamba", ("state", {**PAGED, "snapshots": 1}), RECOMPUTE),
]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in SLOWER)]


class Oracle:
    """Greedy tokens by full forwards, cut where the two best logits are so near that rounding may decide."""

    def __init__(self, family: str, directory: Path) -> None:
        self.model = tiny_model(family, initializer_range=0.3, vocab_size=96, eos_token_id=5)
        self.model.save_pretrained(directory)
        self.path, self.known = directory, dict[tuple[int, ...], tuple[int, bool]]()

    def tokens(self, prompt: tuple[int, ...], count: int) -> tuple[list[int], bool]:
        """At most `count` tokens, and whether the last one is in doubt."""
        ids = list(prompt)
        for _ in range(count):
            token, doubtful = self._next(tuple(ids))
            ids.append(token)
            if doubtful:
                return ids[len(prompt) :], True
        return ids[len(prompt) :], False

    def _next(self, ids: tuple[int, ...]) -> tuple[int, bool]:
        if ids not in self.known:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            best = logits.topk(2)
            self.known[ids] = int(best.indices[0]), float(best.values[0] - best.values[1]) < NEAR_TIE
        return self.known[ids]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def of(family: str) -> Oracle:
        from transformers import CONFIG_MAPPING

        if family not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {family}")
        if family not in made:
            made[family] = Oracle(family, tmp_path_factory.mktemp(family))
        return made[family]

    return of


def bytes_for_three(path: Path, kv: tuple[str, dict[str, Any]]) -> int:
    """KV memory of three longest sequences, where up to eight may run."""
    facts = read_model_facts(resolve_source(ModelSource(source=str(path)), Path()), dtype="float32", dummy=False)
    component = load_catalogue().find(Role.KV, kv[0]).component
    layout = component.build(component.options(**kv[1]), None)
    budget = KVBudget(3, LONGEST, 4, max_query_len=5, states=layer_states(facts))
    found: int = layout.shape(stored_groups(facts, layout), budget).bytes
    return found


#: Of each request: steps before it arrives, its stem, how much of that it begins with, tokens of its own, new
#: tokens, and whether it begins as the request before it (a fork, where that one still runs).
REQUESTS = st.lists(st.tuples(*map(st.integers, (0, 0, 0, 1, 1, 0), (3, 2, 24, 8, 12, 2))), min_size=6, max_size=9)


class Life:
    def __init__(self, engine: Any, oracle: Oracle) -> None:
        self.engine, self.oracle = engine, oracle
        self.totals: Counter[str] = Counter()
        self.forks = 0

    def live(self, drawn: list[tuple[int, ...]]) -> None:
        self.engine.reset()
        self.wanted: list[Request] = []
        self.outputs: dict[str, list[int]] = {}
        for number, (gap, *shape) in enumerate(drawn):
            for _ in range(gap):
                self.step()
            self.submit(number, *shape)
        while self.engine.has_work:
            self.step()
        self.totals.update(self.engine.report().counters)
        assert self.engine._space.usage().allocated_tokens == 0
        for request in self.wanted:
            expected, doubtful = self.oracle.tokens(request.prompt_ids, request.sampling.max_new_tokens)
            sure = len(expected) - doubtful
            assert self.outputs[request.request_id][:sure] == expected[:sure], f"request {request.request_id}"

    def submit(self, number: int, stem: int, begin: int, own: int, new: int, fork: int) -> None:
        tail = tuple(6 + (7 * number + 11 * place + stem) % 90 for place in range(own))
        parent = self.wanted[-1] if self.wanted and fork == 0 else None
        prompt = (*STEMS[stem][:begin], *tail)
        if parent is not None:
            known = (*parent.prompt_ids, *self.outputs[parent.request_id])
            prompt = (*known[: LONGEST - 20], *tail)
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        request = Request(request_id=str(number), prompt_ids=prompt, sampling=sampling)
        self.wanted.append(request)
        self.outputs[request.request_id] = []
        live = {each.request.request_id for each in self.engine._live.values()}
        if parent is not None and parent.request_id in live:
            self.forks += 1
            self.engine.fork(parent.request_id, request)
        else:
            self.engine.submit(request)

    def step(self) -> None:
        if self.engine.has_work:
            for event in self.engine.step():
                self.outputs[event.request_id] += event.token_ids


@pytest.mark.parametrize(("family", "kv", "preemption"), ALL, ids=str)
def test_tokens_are_those_of_full_forwards(
    build_engine: Build, oracle: Callable[[str], Oracle], family: str, kv: Any, preemption: str
) -> None:
    yardstick = oracle(family)
    scheduler = ("continuous", {"max_num_batched_tokens": 24, "chunked": True, "preemption": preemption})
    engine = build_engine(
        {"kv": kv, "scheduler": scheduler}, model=yardstick.path, max_model_len=LONGEST,
        kv_memory_bytes=bytes_for_three(yardstick.path, kv), kv_swap_bytes=1 << 24,
    )  # fmt: skip
    life = Life(engine, yardstick)

    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(REQUESTS)
    def lives(drawn: list[tuple[int, ...]]) -> None:
        life.live(drawn)

    lives()
    # Whatever hypothesis came up with: enough at once that memory runs out, and stems that return.
    life.live([(0, number % 3, 16, 3, 12, 1) for number in range(8)] + [(2, 0, 20, 2, 9, 0)] * 2)
    assert life.forks > 0
    assert not kv[1].get("prefix_cache") or life.totals["prefix_hit_tokens"] > 0
    grows = kv[0] != "dense"  # a row holds the longest sequence: who has one keeps it
    assert (life.totals["preemptions"] > 0) == grows
    assert (life.totals["swaps_in"] > 0) == (grows and preemption == SWAP)
