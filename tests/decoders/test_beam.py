"""Beam search gives the outputs of transformers' `generate`, and shares KV between its rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.errors import Unsupported, UserError
from infermix.measure.drive import drive
from infermix.roles.kv_space import KVShape
from infermix.roles.request import Request, SamplingParams
from infermix.toolkit.masking import MaskedDecoder
from infermix.toolkit.paged_space import PagedSpace
from infermix_decoders.beam_search import BeamSearch
from infermix_decoders.beam_space import BeamSpace

Build = Callable[..., Any]
EOS = 5


def request(name: str, prompt: tuple[int, ...], **sampling: Any) -> Request:
    return Request(request_id=name, prompt_ids=prompt, sampling=SamplingParams(**sampling))


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(11)
    return [tuple(rng.randrange(6, 96) for _ in range(rng.randint(1, 14))) for _ in range(count)]


def search(engine: Any, wanted: list[Request]) -> list[list[list[int]]]:
    samples = drive(engine, wanted, None, keep_outputs=len(wanted)).requests
    assert not any(sample.error for sample in samples), [sample.error for sample in samples]
    return [[output.output_ids for output in sample.outputs] for sample in samples]


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Callable[..., list[list[int]]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def generate(prompt: tuple[int, ...], num_outputs: int, eos: Any = EOS, **given: Any) -> list[list[int]]:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_return_sequences=num_outputs,
            eos_token_id=eos, pad_token_id=0, **given,
        )[:, len(prompt) :].tolist()  # fmt: skip
        ends = {eos} if isinstance(eos, int) else set(eos)
        return [_until(tokens, ends) for tokens in found]

    return generate


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


CASES = {
    "plain": {"num_beams": 4},
    "two": {"num_beams": 2, "length_penalty": 0.0},
    "long": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    "short": {"num_beams": 5, "length_penalty": -1.0},
    "early": {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_outputs_of_generate(build_engine: Build, reference: Any, options: dict[str, Any]) -> None:
    """Many stop tokens, so that outputs end at all lengths."""
    stops = tuple(range(30, 50))
    eos = [EOS, *stops]
    given = prompts(8)
    count = options["num_beams"]
    wanted = [
        request(str(i), prompt, max_new_tokens=10, num_outputs=count, stop_token_ids=stops)
        for i, prompt in enumerate(given)
    ]
    kv = ("paged", {"block_size": 4})
    engine = build_engine(parts={"decoder": ("beam", options), "kv": kv}, max_num_seqs=8 * count)
    found = search(engine, wanted)
    for prompt, outputs in zip(given, found, strict=True):
        assert outputs == reference(prompt, count, eos, max_new_tokens=10, **options)
    assert len({len(output) for outputs in found for output in outputs}) > (options != CASES["long"])
    assert engine._space.usage().allocated_tokens == 0


CHUNKED = ("continuous", {"max_num_batched_tokens": 6, "chunked": True})
RADIX = ("paged", {"block_size": 4, "prefix_cache": "radix"})
MIXES = [("none", "continuous"), ("concat", CHUNKED), ("dense", "static"), ("paged", "static"), (RADIX, CHUNKED)]
#: Nothing is cut under so large a budget, but every fork copies blocks and scores.
MIXES += [(("h2o", {"budget": 96, "block_size": 4}), CHUNKED)]


@pytest.mark.parametrize(("kv", "scheduler"), MIXES, ids=str)
def test_with_every_layout_and_scheduler(build_engine: Build, reference: Any, kv: Any, scheduler: Any) -> None:
    given = prompts(5)
    wanted = [request(str(i), prompt, max_new_tokens=6 + i) for i, prompt in enumerate(given)]
    parts = {"decoder": ("beam", {"num_beams": 3}), "kv": kv, "scheduler": scheduler}
    engine = build_engine(parts=parts, max_num_seqs=15)
    for _ in range(2):  # the second time prompts may come from a prefix cache
        found = search(engine, wanted)
        for i, prompt in enumerate(given):
            assert found[i] == reference(prompt, 1, num_beams=3, max_new_tokens=6 + i)


def test_under_preemption(build_engine: Build, reference: Any) -> None:
    given = prompts(6)
    wanted = [request(str(i), prompt, max_new_tokens=16) for i, prompt in enumerate(given)]
    engine = build_engine(
        parts={"decoder": ("beam", {"num_beams": 3}), "kv": ("paged", {"block_size": 4})},
        max_model_len=32, max_num_seqs=18, kv_memory_bytes=31 * 4 * 2 * 2 * 2 * 16 * 4,
    )  # fmt: skip
    found = search(engine, wanted)
    assert engine.report().counters["preemptions"] > 0
    assert found == [reference(prompt, 1, num_beams=3, max_new_tokens=16) for prompt in given]
    assert engine._space.usage().allocated_tokens == 0


@pytest.mark.parametrize("num_blocks", [11, 12])
def test_room_for_rows_is_promised_to_one_request_only(num_blocks: int) -> None:
    """Two rows of three blocks each: two requests have their worst case in 12 blocks, and in 11 they do not."""
    shape = KVShape((), num_blocks, 4, max_num_seqs=4, max_model_len=12, bytes=0, bytes_per_token=0)
    space = BeamSpace(PagedSpace(shape), shape, width=2)
    assert space.reserve(0, 12)
    assert space.reserve(1, 12) == (num_blocks == 12)
    if num_blocks == 12:
        for seq_id, row in ((0, -1), (1, -2)):
            space.begin(seq_id, 3)
            space.arrange(seq_id, (seq_id, row), [(seq_id, row)], 3)
        assert space.reserve(0, 12)
        assert space.reserve(1, 12)


def test_beams_share_the_blocks_of_their_prompt(build_engine: Build) -> None:
    engine = build_engine(parts={"decoder": ("beam", {"num_beams": 4}), "kv": ("paged", {"block_size": 4})})
    engine.submit(request("r", tuple(range(6, 26)), max_new_tokens=8, ignore_eos=True))
    for _ in range(2):
        engine.step()
    rows = [row.sequence.seq_id for row in next(iter(engine._decoder._groups.values())).rows]
    engine._space.reserve(rows[0], 22)  # forks are made when the next step reserves its room
    tables = [tuple(engine._space.block_table(row)) for row in rows]
    assert len(set(tables)) == 4
    assert len({table[:5] for table in tables}) == 1
    assert engine._space.usage().allocated_tokens == 20 + 4 * 4


def test_where_nothing_ends_the_best_go_on() -> None:
    """What most steps do is told apart from the rest; both have to agree, until an output ends."""
    search = BeamSearch(2, max_new_tokens=4, stops=frozenset({9}))
    outputs = [[1], [2]]
    assert search.advance([-1.0, -2.0, -3.0], [1, 0, 0], [7, 8, 9], outputs.__getitem__) == ([1, 0], [7, 8])
    assert (search.scores, search.finished, search.length) == ([-1.0, -2.0], [], 1)
    assert search.advance([-1.5, -2.5, -3.5], [0, 1, 1], [9, 3, 9], outputs.__getitem__) == ([1], [3])
    assert [(each.score, each.tokens) for each in search.finished] == [(-0.75, (1, 9))]
    assert not search.done


def test_minimum_length(build_engine: Build, reference: Any) -> None:
    stops = tuple(range(20, 70))
    given = prompts(4)
    wanted = [
        request(str(i), prompt, max_new_tokens=12, min_new_tokens=7, stop_token_ids=stops)
        for i, prompt in enumerate(given)
    ]
    found = search(build_engine(parts={"decoder": ("beam", {"num_beams": 3})}, max_num_seqs=12), wanted)
    for prompt, output in zip(given, found, strict=True):
        assert output == reference(prompt, 1, [EOS, *stops], num_beams=3, max_new_tokens=12, min_new_tokens=7)
        assert len(output[0]) >= 8


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"num_outputs": 5}, "5 outputs of 4 beams"),
        ({"temperature": 0.5}, "draws nothing"),
        ({"stop": ("x",)}, "stop tokens only"),
        ({"repetition_penalty": 1.2}, "does not apply"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_a_search_does_not_do(build_engine: Build, sampling: dict[str, Any], message: str) -> None:
    engine = build_engine(parts={"decoder": "beam"})
    engine.submit(request("r", (7, 8), max_new_tokens=3, **sampling))
    with pytest.raises(UserError, match=message):
        engine.step()


def test_no_masks_over_a_search(build_engine: Build) -> None:
    decoder = build_engine(parts={"decoder": "beam"})._decoder
    with pytest.raises(Unsupported, match="no mask can restrict"):
        MaskedDecoder(decoder, masks=None)  # type: ignore[arg-type]
