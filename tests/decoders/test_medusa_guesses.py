"""Medusa heads are asked once a step, replayed or launched, and every sequence gets what they say of its own text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from decoding import generate, requests
from infermix.engine import assembly
from infermix.roles.request import Sequence
from infermix_decoders.medusa_guesses import HeadGuesses
from infermix_decoders.medusa_heads import MedusaHeads
from infermix_decoders.medusa_tree import assumed_accuracy, best_tree
from torch import Tensor
from watched_rounds import Recorder, count_runs

Build = Callable[..., Any]
MEDUSA = ("medusa", {"heads": "medusa", "num_draft_tokens": 12})
WIDTH, VOCABULARY = 16, 40


def made_guesses(max_num_seqs: int = 8) -> HeadGuesses:
    torch.manual_seed(2)
    heads = MedusaHeads(3, 1, WIDTH, VOCABULARY).requires_grad_(False)
    return HeadGuesses(heads, best_tree(assumed_accuracy(3, 5), 14), max_num_seqs, torch.zeros(VOCABULARY, WIDTH))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_replay_guesses_what_a_launch_does(count: int) -> None:
    """Also behind a larger one, whose rows are still there."""
    hidden = torch.randn(30, WIDTH)
    launched, replayed, recorder = made_guesses(), made_guesses(), Recorder()
    list(replayed.capture_all(recorder))
    assert replayed.batches == (1, 2, 4, 8)
    assert recorder.captured == 4
    for rows in (list(range(8)), [29 - 2 * index for index in range(count)]):
        assert launched(hidden, rows).tolist() == replayed(hidden, rows).tolist()
    assert recorder.replayed == 2


def test_shapes_are_few_and_hold_every_step() -> None:
    for most in (1, 5, 8, 600, 1 << 14):
        batches = made_guesses(most).batches
        assert batches[0] == 1
        assert batches[-1] == most
        assert len(batches) <= 12


class Afresh:
    """The tokens of a tree, from the whole text each time."""

    def __init__(self, drafter: Any, model: Any) -> None:
        self._guesses, self._model = drafter._guesses, model

    def tokens(self, sequence: Sequence) -> tuple[int, ...]:
        # The heads read what the newest token was read from: the state behind the one before it.
        hidden: Tensor = self._model.model(torch.tensor([sequence.tokens[:-1]]), use_cache=False)[0][0, -1:]
        return tuple(self._guesses._guessed(hidden)[0].tolist())


@pytest.mark.parametrize("replays", [False, True])
def test_trees_are_those_of_the_whole_text(
    build_engine: Build, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, replays: bool
) -> None:
    """Prompts in chunks, steps without some of the sequences, preemption: guesses are never those of others."""
    from transformers import LlamaForCausalLM

    recorder = Recorder()
    if replays:
        monkeypatch.setattr(assembly, "DecoderCapture", lambda build: recorder)
    model = LlamaForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager").eval()
    engine = build_engine(
        parts={
            "decoder": MEDUSA,
            "kv": ("paged", {"block_size": 4}),
            "scheduler": ("continuous", {"max_num_seqs": 5, "max_num_batched_tokens": 24, "chunked": True}),
        },
        max_model_len=44,
        kv_memory_bytes=12 * 4 * 2 * 2 * 2 * 16 * 4,
    )
    drafter = engine._decoder._drafter
    afresh, propose, runs, compared = Afresh(drafter, model), drafter.propose, count_runs(drafter._guesses), []

    def checked(sequences: Seq[Sequence], depths: Seq[int]) -> Any:
        trees = propose(sequences, depths)
        for sequence, tree in zip(sequences, trees, strict=True):
            if len(tree.tokens) == drafter.num_nodes:
                assert tree.tokens == afresh.tokens(sequence)
                compared.append(sequence.seq_id)
        return trees

    drafter.propose = checked
    generate(engine, requests({"temperature": 0.7}, count=9))
    counters = engine.report().counters
    assert counters["preemptions"] > 0
    assert counters["accepted_draft_tokens"] > 0
    assert len(set(compared)) > 5
    assert recorder.replayed == (len(runs) if replays else 0)
    assert bool(runs) == replays


def test_what_was_captured_is_on_record(build_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    told = build_engine(parts={"decoder": MEDUSA}).report().executed["decoder"]["graphs"]
    assert told == {"captured": 0, "reason": "steps run eagerly on cpu"}
    monkeypatch.setattr(assembly, "DecoderCapture", lambda build: Recorder())
    told = build_engine(parts={"decoder": MEDUSA}).report().executed["decoder"]["graphs"]
    assert told == {"captured": 4, "batches": [1, 2, 4, 8]}


def test_sequences_that_are_gone_have_no_guesses(build_engine: Build) -> None:
    """Whether they were read or not."""
    engine = build_engine(parts={"decoder": MEDUSA})
    wanted = requests({})
    drafter = engine._decoder._drafter
    generate(engine, wanted)
    assert drafter._known == {}
    assert drafter._unread is None or set(drafter._unread[0]) == {None}
    assert drafter.propose([Sequence(0, wanted[0], [1, 2], 1)], [3])[0].tokens == ()
