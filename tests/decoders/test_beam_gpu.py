"""Beams ranked by replays on a GPU: the outputs of beams that are ranked operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_beam import prompts, request, search

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Build = Callable[..., Any]


@pytest.mark.parametrize("num_beams", [2, 3])
@pytest.mark.parametrize("count", [1, 7])
def test_same_outputs_from_replays(build_engine: Build, num_beams: int, count: int) -> None:
    wanted = [
        request(str(number), prompt, max_new_tokens=6 + number, num_outputs=num_beams)
        for number, prompt in enumerate(prompts(count))
    ]
    given: dict[str, Any] = {"device": "cuda", "kv_memory_bytes": 1 << 26, "max_num_seqs": 7 * num_beams}
    parts = {
        "decoder": ("beam", {"num_beams": num_beams}), "kv": ("paged", {"block_size": 16}), "attention": "triton",
    }  # fmt: skip
    launched = build_engine(parts=parts, engine={"graphs": "off"}, **given)
    replayed = build_engine(parts=parts, **given)
    assert launched.report().executed["decoder"]["graphs"]["captured"] == 0
    assert replayed.report().executed["decoder"]["graphs"]["captured"] > 0
    assert search(replayed, wanted) == search(launched, wanted)
    assert replayed.report().counters["rankings_replayed"] > 0
