"""The load-time check admits right models in every dtype and refuses wrong parts."""

from __future__ import annotations

from typing import Any

import packed_walk as walk
import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.self_check import self_check
from infermix.engine.walk import Piece, steps
from infermix.errors import Unsupported, WrongResult
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.kv_paged import PagedLayout
from tiny_models import tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Dense, mixed windows with softcap, experts, sinks, latent attention.
FAMILIES = ("llama", "gemma2", "olmoe", "gpt_oss", "deepseek_v3")


def check(model: Any, attention: Any, dtype: torch.dtype, kind: type[Joint] = Joint) -> dict[str, Any]:
    return self_check(model, kind(model), attention, PagedLayout(4), device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_parts_pass(family: str, dtype: torch.dtype) -> None:
    report = check(tiny_model(family).to(dtype), EagerAttention(), dtype)
    assert report["relative_error"] <= report["tolerance"]
    assert report["windows_crossed"]
    assert report["num_tokens"] > 40


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mutant", [walk.WrongScale, walk.Leaking])
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_parts_fail(family: str, mutant: type[EagerAttention], dtype: torch.dtype) -> None:
    with pytest.raises(WrongResult, match="self-check failed"):
        check(tiny_model(family).to(dtype), mutant(), dtype)


def test_an_ignored_window_fails() -> None:
    with pytest.raises(WrongResult):
        check(tiny_model("mistral").to(torch.bfloat16), walk.WithoutWindow(), torch.bfloat16)


def test_shifted_positions_fail() -> None:
    with pytest.raises(WrongResult):
        check(tiny_model("llama"), EagerAttention(), torch.float32, walk.ShiftedJoint)


def test_the_joint_is_left_detached() -> None:
    model = tiny_model("llama")
    joint = Joint(model)
    self_check(model, joint, EagerAttention(), PagedLayout(4), device=torch.device("cpu"), dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(Unsupported, match="attach"):
        joint.forward(None)  # type: ignore[arg-type]


def test_a_window_too_long_to_cross_is_reported() -> None:
    model = tiny_model("mistral", sliding_window=4096, max_position_embeddings=8192)
    assert not check(model, EagerAttention(), torch.float32)["windows_crossed"]


def test_steps_mix_joins_chunks_single_tokens_and_finishes() -> None:
    walked = list(steps((3, 9), chunk=4, num_decode=2))
    assert walked == [
        [Piece(0, 0, 1)],
        [Piece(0, 1, 1), Piece(1, 0, 4)],
        [Piece(0, 2, 1), Piece(1, 4, 3)],
        [Piece(1, 7, 1)],
        [Piece(1, 8, 1)],
    ]
