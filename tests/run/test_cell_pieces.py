"""Pieces of a cell: sizes, outputs, roofline, the reference cell, the Python API."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import infermix
import pytest
from infermix.cell import sizes
from infermix.cell.outputs import KEPT, drop_ids, figures, first_outputs
from infermix.cell.reference import reference_cell
from infermix.cost.machine import machine_facts, store_ceilings
from infermix.errors import UserError
from infermix.record.record import Repeat, RequestSample
from infermix.roles.component import Options, Role
from infermix.roles.evaluator import EvaluatorOptions
from infermix.roles.facts import Ceilings
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import REFERENCE_PARTS


def request(name: str, prompt: int, new: int) -> Request:
    return Request(request_id=name, prompt_ids=tuple(range(prompt)), sampling=SamplingParams(max_new_tokens=new))


class TokenOptions(EvaluatorOptions, frozen=True, kw_only=True):
    tokens: int = 0

    def max_tokens(self) -> int:
        return self.tokens


class SchedulerOptions(Options, frozen=True, kw_only=True):
    max_num_seqs: int = 4


def choice(options: Options) -> Any:
    return SimpleNamespace(options=options, component=SimpleNamespace(name="perplexity"))


def plan(positions: int, limit: int | None = None) -> Any:
    limits = SimpleNamespace(max_model_len=limit)
    cell = SimpleNamespace(experiment=SimpleNamespace(limits=limits))
    return SimpleNamespace(facts=SimpleNamespace(max_position_embeddings=positions), cell=cell)


def test_the_longest_sequence_counts_workload_and_evaluators() -> None:
    requests = [request("a", 10, 5), request("b", 3, 20)]
    assert sizes.max_model_len(plan(100), requests, []) == 23
    assert sizes.max_model_len(plan(100), requests, [choice(TokenOptions(tokens=64))]) == 64
    assert sizes.max_model_len(plan(100), requests, [choice(EvaluatorOptions())]) == 100
    assert sizes.longest_allowed(plan(100, 50)) == 50


def test_an_evaluator_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(UserError, match="perplexity reads 101 tokens at once, but a sequence may have 100"):
        sizes.max_model_len(plan(100), [], [choice(TokenOptions(tokens=101))])


def test_sequences_are_bounded_by_scheduler_workload_and_requests() -> None:
    parts = {Role.SCHEDULER: choice(SchedulerOptions(max_num_seqs=8))}
    assert sizes.max_num_seqs(parts, None, 100) == 8
    assert sizes.max_num_seqs(parts, 2, 100) == 2
    assert sizes.max_num_seqs(parts, None, 5) == 5
    assert sizes.max_num_seqs({}, None, 1000) == sizes.DEFAULT_MAX_NUM_SEQS
    assert sizes.max_num_seqs({**parts, Role.ENGINE: choice(SchedulerOptions(max_num_seqs=4))}, None, 100) == 4


def test_requests_that_cannot_run_are_named() -> None:
    sizes.check_requests([request("a", 10, 5)], 15)
    with pytest.raises(UserError, match="'a' needs 10 prompt and 5 new tokens, but a sequence may have 14"):
        sizes.check_requests([request("a", 10, 5)], 14)
    with pytest.raises(UserError, match="'b' has an empty prompt"):
        sizes.check_requests([request("b", 0, 5)], 14)


def sample(name: str, ids: list[int], error: str = "") -> RequestSample:
    return RequestSample(
        request_id=name, arrival_s=0, sent_s=0, input_tokens=3, emissions=[], finish_reason="length",
        output_ids=ids, error=error,
    )  # fmt: skip


def test_output_figures() -> None:
    requests = [request(name, 3, 8) for name in "abcd"]
    samples = [sample("a", [7] * 8), sample("b", [1, 2, 3]), sample("c", []), sample("d", [], error="refused")]
    found = figures(Repeat(wall_s=1, requests=samples), requests)
    assert (found.outputs, found.degenerate, found.empty, found.single_token) == (3, 1, 1, None)


def test_short_outputs_may_be_one_token() -> None:
    found = figures(Repeat(wall_s=1, requests=[sample("a", [7] * 3)]), [request("a", 3, 3)])
    assert (found.degenerate, found.single_token) == (0, None)


def test_only_the_first_outputs_are_kept() -> None:
    names = [f"r{number}" for number in range(KEPT + 2)]
    repeat = Repeat(wall_s=1, requests=[sample(name, [65, 66]) for name in names])
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    first = first_outputs(repeat, [request(name, 3, 2) for name in names], tokenizer)
    drop_ids(repeat)
    assert [each["text"] for each in first] == ["AB"] * KEPT
    assert [len(each.output_ids) for each in repeat.requests] == [2] * KEPT + [0, 0]


def test_the_reference_cell(experiment: Callable[..., Path], plugin: str) -> None:
    (planned,) = infermix.plan(experiment(quality=[{"use": "fake"}]), extra_plugins=[plugin])
    cell = reference_cell(planned.cell)
    assert {role: use.name for role, use in cell.experiment.parts.items()} == REFERENCE_PARTS
    assert cell.experiment.engine.name == "native"
    assert cell.experiment.quality == ()
    assert cell.experiment.model == planned.cell.experiment.model


def test_the_roofline_counts_weights_once_per_forward(experiment: Callable[..., Path], plugin: str) -> None:
    path = experiment(workload={"use": "fake", "num_requests": 1, "max_new_tokens": 8, "concurrency": 1})
    copy_rate, matmul_rate = 1e9, 1e10
    store_ceilings(machine_facts("cpu"), Ceilings(copy_rate, {"float32": matmul_rate}, "2026-01-01T00:00:00Z"))
    (record,) = infermix.run(path, out=path.parent / "out", extra_plugins=[plugin])
    seconds = sum(repeat.wall_s for repeat in record.repeats)
    # Per layer: q and o 16x16, k and v 16x8, three 16x32 of the MLP; output layer 64x16. Two repeats of 8 steps.
    layers, output = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32), 64 * 16
    weights = 2 * 8 * 4 * (layers + output)
    assert record.roofline["mbu"] * copy_rate * seconds == pytest.approx(weights, rel=0.1)
    # The prompt's 3 tokens and 7 decoded ones pass the layers, 8 rows the output layer.
    flops = 2 * 2 * (10 * layers + 8 * output)
    assert record.roofline["mfu"] * matmul_rate * seconds == pytest.approx(flops, rel=0.1)


def test_without_ceilings_the_roofline_says_why(experiment: Callable[..., Path], plugin: str) -> None:
    path = experiment()
    (record,) = infermix.run(path, out=path.parent / "out", ceilings=False, extra_plugins=[plugin])
    assert "not measured" in record.roofline["reason"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, infermix; infermix.__version__; infermix.run, infermix.plan, infermix.leaderboard;"
        "import infermix.sweep, infermix.child;"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_verbs_stay_functions_whatever_was_imported() -> None:
    import infermix.child
    import infermix.sweep

    assert callable(infermix.run)
    assert callable(infermix.plan)
    assert callable(infermix.leaderboard)


def test_a_leaderboard_from_python(experiment: Callable[..., Path], plugin: str, tmp_path: Path) -> None:
    infermix.run(experiment(), out=tmp_path / "out", ceilings=False, extra_plugins=[plugin])
    written = infermix.leaderboard(tmp_path / "out", out=tmp_path / "board")
    assert {path.name for path in written} >= {"LEADERBOARD.md", "leaderboard.html"}


def test_a_plugin_that_fails_to_import_is_named(experiment: Callable[..., Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken_plugin.py"
    broken.write_text("raise RuntimeError('half written')")
    with pytest.raises(UserError, match=r"broken_plugin\.py.*half written"):
        infermix.plan(experiment(), extra_plugins=[str(broken)])
