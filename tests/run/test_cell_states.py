"""Every way in which a cell can end is a record with a state and a reason, and the sweep goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import infermix
import psutil
import pytest
from infermix.errors import UserError
from infermix.record.record import Record

Write = Callable[..., Path]


@pytest.fixture
def run(experiment: Write, plugin: str, tmp_path: Path) -> Callable[..., Record]:
    def go(**keys: Any) -> Record:
        (record,) = infermix.run(experiment(**keys), out=tmp_path / "out", ceilings=False, extra_plugins=[plugin])
        return record

    return go


def fault(name: str, during: str = "repeat", **options: Any) -> dict[str, Any]:
    return {"engine": {"use": "fake", "fault": name, "during": during, **options}}


def test_a_good_cell_has_everything(run: Callable[..., Record]) -> None:
    record = run()
    assert (record.state, record.reason, record.complete) == ("ok", "", True)
    assert len(record.repeats) == 2
    assert record.metrics["output_tokens_per_s"].value > 0
    assert len(record.metrics["output_tokens_per_s"].samples) == 2
    assert {"start", "plan", "workload", "engine", "engine.load", "warmup", "measure"} <= set(record.phases_s)
    assert record.memory["weight_bytes"] == 1000
    assert record.memory["peak_bytes"] > 0
    assert record.self_check == {"passed": True}
    assert record.engine is not None
    assert record.engine.executed == {"class": "FakeEngine"}
    assert record.outputs[0]["token_ids"] == list(range(3, 11))
    assert record.counters["steps"] == 16
    assert record.environment["threads"]["OMP_NUM_THREADS"] == "1"
    assert record.track
    assert [guard.verdict for guard in record.guards if guard.name == "output_length"] == ["green"]


def test_a_self_check_that_was_switched_off_makes_the_row_yellow(run: Callable[..., Record]) -> None:
    (guard,) = [guard for guard in run(**fault("none", self_check=False)).guards if guard.name == "self_check"]
    assert (guard.verdict, guard.detail) == ("yellow", "switched off by the experiment")
    assert "self_check" not in {guard.name for guard in run(**fault("none")).guards}


def test_what_an_engine_prints_is_the_log(run: Callable[..., Record]) -> None:
    log = run().log
    assert "fake engine on stdout" in log
    assert "fake engine on stderr" in log


def test_garbage_on_stdout_does_not_break_the_protocol(run: Callable[..., Record]) -> None:
    record = run(**fault("garbage"))
    assert record.state == "ok"
    assert '{"type": "done"}' in record.log


@pytest.mark.parametrize(
    ("name", "during", "state", "words"),
    [
        ("crash", "build", "error", "SIGSEGV"),
        ("crash", "repeat", "error", "SIGSEGV"),
        ("kill", "repeat", "error", "SIGKILL"),
        ("exit", "repeat", "error", "exit code 7"),
        ("raise", "build", "error", "ValueError: the flux capacitor is empty"),
        ("user", "repeat", "error", "workload.path: the prompt is too long"),
        ("memory", "build", "oom", "4 GB asked, 1 GB there"),
        ("torch_memory", "repeat", "oom", "CUDA out of memory"),
    ],
)
def test_failures(run: Callable[..., Record], name: str, during: str, state: str, words: str) -> None:
    record = run(**fault(name, during))
    assert record.state == state
    assert words in record.reason
    assert record.complete
    assert not record.metrics


def test_unsupported_while_loading_means_that_the_parts_do_not_mix(run: Callable[..., Record]) -> None:
    record = run(**fault("unsupported", "build"))
    assert (record.state, record.reason) == ("invalid", "no soft caps here")


def test_unsupported_later_is_an_error(run: Callable[..., Record]) -> None:
    record = run(**fault("unsupported", "repeat"), measure={"repeats": 1, "warmup": 0})
    assert (record.state, record.reason) == ("error", "no soft caps here")


def test_the_traceback_is_in_the_log(run: Callable[..., Record]) -> None:
    assert any("fake_plugin.py" in line for line in run(**fault("raise")).log)


def test_a_hanging_cell_times_out_and_shows_where(run: Callable[..., Record]) -> None:
    record = run(**fault("hang", "build"), measure={"repeats": 1, "time_limit_s": 2.0})
    assert record.state == "timeout"
    assert "2 s" in record.reason
    assert "engine" in record.reason
    assert any("_hang" in line for line in record.log)


def test_an_engine_that_fails_to_close_was_measured_all_the_same(run: Callable[..., Record]) -> None:
    record = run(**fault("raise", "close"))
    assert record.state == "ok"
    assert record.metrics
    assert any("flux" in line for line in record.log)


def test_a_failed_self_check_is_wrong_and_nothing_is_measured(run: Callable[..., Record]) -> None:
    record = run(engine={"use": "fake", "passes": False})
    assert record.state == "wrong"
    assert "logits differ" in record.reason
    assert not record.repeats


def test_empty_outputs_are_wrong_and_their_speed_is_not_published(run: Callable[..., Record]) -> None:
    record = run(engine={"use": "fake", "output": "empty"})
    assert record.state == "wrong"
    assert "100% of the outputs are empty" in record.reason
    assert not record.metrics
    assert len(record.repeats) == 2


def test_random_weights_may_repeat_one_token(run: Callable[..., Record]) -> None:
    record = run(engine={"use": "fake", "output": "same"})
    assert record.state == "ok"
    assert record.counters["degenerate_share"] == 1.0


def test_quality_of_random_weights_is_not_computed(run: Callable[..., Record]) -> None:
    record = run(quality=[{"use": "fake"}])
    assert record.state == "ok"
    assert not record.quality
    assert any("n/a" in line for line in record.log)


def test_a_prompt_beyond_the_models_positions_is_named(run: Callable[..., Record]) -> None:
    record = run(workload={"use": "fake", "max_new_tokens": 500})
    assert record.state == "error"
    assert "request 'r0' needs 3 prompt and 500 new tokens" in record.reason


def test_a_workload_without_requests_is_refused(run: Callable[..., Record]) -> None:
    record = run(workload={"use": "fake", "num_requests": 0})
    assert record.state == "error"
    assert "no requests" in record.reason


def test_no_process_is_left_behind(run: Callable[..., Record]) -> None:
    """Zombies count; helper processes that other tests started in this one do not."""
    before = _children()
    run(**fault("crash"))
    run(**fault("hang", "build"), measure={"repeats": 1, "time_limit_s": 1.0})
    assert _children() <= before


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_unknown_gates_are_refused_before_anything_runs(run: Callable[..., Record], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="perplexity_ratio"):
        run(measure={"gates": {"perplexity_ration": 2.0}})
    assert not (tmp_path / "out").exists()
