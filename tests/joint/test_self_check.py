"""The load-time check admits right models in every dtype and refuses wrong parts."""

from __future__ import annotations

from typing import Any

import packed_walk as walk
import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.self_check import collect_reference, self_check
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


class _TogetherRounded(torch.nn.Module):
    """Activations in 8 bits with one scale for all tokens of a forward."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 127
        return self.linear(torch.round(x / scale) * scale)


def _rounded_model() -> Any:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = _TogetherRounded(layer.mlp.down_proj)
        layer.self_attn.o_proj = _TogetherRounded(layer.self_attn.o_proj)
    return model


def _check_rounded(attention: Any, rounded: bool, kind: type[Joint] = Joint) -> dict[str, Any]:
    model = _rounded_model()
    joint = kind(model)
    reference = collect_reference(model, joint, rounded=rounded)
    device = torch.device("cpu")
    return self_check(
        model, joint, attention, PagedLayout(4), device=device, dtype=torch.float32, reference=reference
    )


def test_tokens_that_are_rounded_together_pass_as_far_as_the_model_itself_varies() -> None:
    """What a step computes depends on its company then, in the model's own forward as in ours."""
    report = _check_rounded(EagerAttention(), rounded=True)
    assert 1e-4 < report["relative_error"] <= report["tolerance"] < 0.1
    with pytest.raises(WrongResult, match="self-check failed"):
        _check_rounded(EagerAttention(), rounded=False)


def test_a_model_that_rounds_nothing_gains_no_tolerance() -> None:
    """Weights alone are rounded: what batch sizes change is all that the model varies by."""
    model = tiny_model("llama")
    assert collect_reference(model, Joint(model), rounded=True).noise_floor < 2e-4
    rounding = _rounded_model()
    assert collect_reference(rounding, Joint(rounding), rounded=True).noise_floor > 1e-3
    assert collect_reference(rounding, Joint(rounding)).noise_floor == 0


@pytest.mark.parametrize("mutant", [walk.WrongScale, walk.Leaking])
def test_wrong_parts_fail_under_rounding_too(mutant: type[EagerAttention]) -> None:
    with pytest.raises(WrongResult, match="self-check failed"):
        _check_rounded(mutant(), rounded=True)
    with pytest.raises(WrongResult):
        _check_rounded(EagerAttention(), True, walk.ShiftedJoint)


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
