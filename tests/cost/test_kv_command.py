"""`infermix kv`: bytes and capacity of every layout from the code that allocates."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from infermix.commands import kv
from infermix.compose import compose
from infermix.cost.kv_capacity import sequences_that_fit
from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.spec.load import load_experiment
from infermix_reference.kv_dense import DenseLayout
from infermix_reference.kv_none import RecomputeLayout
from infermix_reference.kv_paged import PagedLayout

H200 = ("--memory-gb", "141", "--device", "cpu", "--dtype", "bfloat16")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    kv.add_arguments(parser)
    return kv.execute(parser.parse_args(arguments))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def rows(data: dict[str, Any]) -> dict[str, Any]:
    return {row["layout"]: row for row in data["layouts"]}


def test_llama_8b_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """131,072 bytes a token; a sequence of 8,192 tokens is 1 GiB, paged has one block of 16 more for all."""
    data = answer(capsys, "shape:llama-3-8b", "--context", "8192", "--batch", "4", *H200)
    paged = rows(data)["paged"]
    assert paged["bytes_per_token"] == 131_072
    assert paged["bytes_per_sequence"] == 2**30
    assert paged["batch_bytes"] == 4 * 2**30 + 16 * 131_072
    assert paged["sequences_that_fit"] == (data["kv_room_bytes"] - 16 * 131_072) // 2**30
    assert 100 < paged["sequences_that_fit"] < 120
    assert rows(data)["dense"]["batch_bytes"] == 5 * 2**30


def test_every_registered_layout_has_a_row_with_figures_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(answer(capsys, "shape:llama-3-8b", *H200))
    assert list(found) == [each.component.name for each in load_catalogue().all(Role.KV)]
    for row in found.values():
        assert row["reason"] or row["batch_bytes"] is not None
    assert found["none"]["sequences_that_fit"] is None
    assert found["none"]["batch_bytes"] == 0


def test_a_reason_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--layouts", "kivi:group_size=48,block_size=48,residual_length=96")
    (row,) = answer(capsys, "shape:llama-3-8b", *given, *H200)["layouts"]
    assert row["reason"].endswith("(sizes that fit: 2, 4, 8, 16, 32, 64, 128)")


def test_layouts_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "shape:llama-3-8b", "--layouts", "paged:block_size=256", "paged", "--context", "100", *H200)
    wide, narrow = data["layouts"]
    assert wide["layout"] == "paged:block_size=256"
    assert wide["bytes_per_sequence"] == 256 * 131_072
    assert narrow["bytes_per_sequence"] == 112 * 131_072


def test_the_fraction_bounds_the_room(capsys: pytest.CaptureFixture[str]) -> None:
    half = answer(capsys, "shape:llama-3-8b", *H200, "--kv-memory-fraction", "0.5")
    most = answer(capsys, "shape:llama-3-8b", *H200, "--kv-memory-fraction", "1")
    assert most["kv_room_bytes"] - half["kv_room_bytes"] == pytest.approx(70.5e9)


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("shape:llama-3-8b", "--context", "8192", *H200) == 0
    out = capsys.readouterr().out
    assert "131,072" in out
    assert "1.07 GB" in out
    assert "any number" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layouts", "pagd"), "no kv component is called 'pagd'.*did you mean 'paged'"),
        (("--layouts", "paged:block_size=0"), "block_size"),
        (("--context", "1000000"), "the model has 8192 positions, not 1000000"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("shape:llama-3-8b", *arguments, *H200)


@pytest.mark.parametrize("text", ["0", "1.5", "much"])
def test_a_bad_fraction_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        run("shape:llama-3-8b", "--kv-memory-fraction", text)


@pytest.mark.parametrize("layout", [PagedLayout(4), PagedLayout(16), DenseLayout()])
@pytest.mark.parametrize("room", [0, 1000, 5_000, 123_456])
def test_what_fits_is_what_allocation_admits(layout: Any, room: int) -> None:
    """The largest number whose shape stays inside the room; one more would not."""
    groups, budget = (KVGroup((0, 1), 2, 4, 4),), KVBudget(1, 24, 4)
    count = sequences_that_fit(layout, groups, budget, room)
    assert count is not None
    taken = [layout.shape(groups, KVBudget(n, 24, 4)).bytes for n in (max(count, 1), count + 1)]
    assert (taken[0] <= room) == (count > 0)
    assert taken[1] > room
    if count:
        shape = layout.shape(groups, KVBudget(10_000, 24, 4, max_bytes=room))
        space = layout.space(shape)
        assert sum(space.reserve(seq_id, 24) for seq_id in range(count + 5)) >= count


def test_nothing_bounds_a_layout_that_keeps_nothing() -> None:
    assert sequences_that_fit(RecomputeLayout(), (KVGroup((0,), 2, 4, 4),), KVBudget(1, 24, 4), 0) is None


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from infermix import cli; assert cli.main(['kv', 'shape:llama-3-8b', '--device', 'cpu']) == 0; "
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plan_says_how_many_sequences_of_the_cell_fit(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "model: {source: 'shape:smollm2-135m', weights: dummy}\ndevice: cpu\ndtype: bfloat16\n"
        "workload: {use: synthetic, input_tokens: 100, output_tokens: 28}\nlimits: {kv_memory_bytes: 100000000}\n"
        "parts: {kv: paged}\n"
    )
    (plan,) = compose(load_experiment(str(file)), load_catalogue())
    block_bytes = 16 * 23_040
    assert plan.sequences_that_fit == (100_000_000 // block_bytes - 1) // 8
