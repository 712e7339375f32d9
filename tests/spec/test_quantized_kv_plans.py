"""What a plan says about quantized KV: memory from the layout that allocates, and every fault that options show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from infermix.compose import CellPlan, compose
from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.roles.facts import MachineFacts
from infermix.spec.load import load_experiment

H200 = MachineFacts("cuda", "NVIDIA H200", 141 << 30, 132, compute_capability=90)
TEXT = (
    'model: {{source: "shape:llama-3-8b", weights: dummy}}\ndtype: bfloat16\n'
    "workload: {{use: synthetic, num_requests: 8, input_tokens: 1024, output_tokens: 64, concurrency: 8}}\n"
    "parts: {{kv: {kv}, attention: sdpa}}\n"
)


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., CellPlan]:
    def of(kv: str, machine: MachineFacts = H200) -> CellPlan:
        path = tmp_path / "x.yaml"
        path.write_text(TEXT.format(kv=kv), encoding="utf-8")
        (only,) = compose(load_experiment(str(path)), load_catalogue(), machine=machine)
        return only

    return of


def test_memory_is_that_of_the_layout(plan: Any) -> None:
    taken = {
        kv: plan(kv).memory.kv_bytes
        for kv in ("paged", "quantized", "{use: quantized, dtype: fp8}", "kivi", "{use: kivi, bits: 2}")
    }
    share = {kv: size / taken["paged"] for kv, size in taken.items()}
    assert share["quantized"] == share["{use: quantized, dtype: fp8}"] == pytest.approx(264 / 512)
    assert 0.3125 < share["kivi"] < 0.3125 + 129 / 1088 * 9 / 8
    assert 0.1875 < share["{use: kivi, bits: 2}"] < share["kivi"]


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_a_fraction_of_the_device_sizes_the_pool(tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT.format(kv="paged") + f"limits: {{kv_memory_fraction: {fraction}}}\n", encoding="utf-8")
    (cell,) = compose(load_experiment(str(path)), load_catalogue(), machine=H200)
    token, reserve = 2 * 32 * 8 * 128 * 2, 2 << 30
    others = cell.memory.total_bytes - cell.memory.kv_bytes
    room = int(fraction * H200.memory_bytes) - others - reserve
    assert cell.max_model_len == 1088
    assert cell.sequences_that_fit == (room - 16 * token) // (1088 * token)


def test_a_fraction_means_nothing_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT.format(kv="paged") + "limits: {kv_memory_fraction: 0.5}\n", encoding="utf-8")
    machine = replace(H200, device="cpu", name="a CPU", compute_capability=None)
    (cell,) = compose(load_experiment(str(path)), load_catalogue(), machine=machine)
    assert not cell.runs
    assert any("limits.kv_memory_fraction is 0.5, but a CPU's KV" in reason for reason in cell.reasons)


def test_group_sizes_that_do_not_divide_a_head(plan: Any) -> None:
    cell = plan("{use: kivi, group_size: 48, block_size: 48, residual_length: 96}")
    assert not cell.runs
    (reason,) = cell.reasons
    assert reason.startswith("group_size 48 of kv 'kivi' does not divide the 128 channels of a value head (sizes")


def test_fp8_on_an_old_device(plan: Any) -> None:
    cell = plan("{use: quantized, dtype: fp8}", replace(H200, name="NVIDIA A100", compute_capability=80))
    assert cell.reasons == ("kv 'quantized' needs sm:89, this cell runs on cuda (NVIDIA A100)",)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ("{use: kivi, residual_length: 40}", "residual_length 40 is too small"),
        ("{use: kivi, block_size: 16}", "block_size 16 is not a multiple of group_size 32"),
        ("{use: quantized, dtype: int3}", "dtype"),
        ("{use: kivi, bits: 3}", "bits"),
        ("{use: snapkv, budget: 16}", "budget 16 does not hold the last observation_window 32 tokens"),
        ("{use: snapkv, pool_kernel: 4}", "pool_kernel 4 is even"),
    ],
)
def test_options_are_faults_of_the_file(plan: Any, kv: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(kv)
    assert "x.yaml:4" in str(caught.value)


def test_more_drafts_than_the_tail_takes_back() -> None:
    from types import SimpleNamespace

    from infermix.fitting import _draft_problems
    from infermix.roles.component import Choice, Role
    from infermix.roles.kv_space import KVBudget, KVGroup

    registered = load_catalogue().find(Role.KV, "kivi")
    kv = Choice(registered, registered.component.options())
    shape = registered.component.build(kv.options, None).shape((KVGroup((0,), 1, 32, 32),), KVBudget(1, 64, 2))
    drafts = [SimpleNamespace(num_draft_tokens=count, second=None) for count in (32, 33)]
    assert list(_draft_problems(kv, shape, drafts[0])) == []  # type: ignore[arg-type]
    assert list(_draft_problems(kv, shape, drafts[1])) == [  # type: ignore[arg-type]
        "kv 'kivi' can take back 32 tokens of a sequence, the decoder drafts 33"
    ]
