"""Which records share a table, and what the environment says."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import msgspec
import pytest
from infermix.record.environment import capture_environment, git_state, package_versions
from infermix.record.track import track_id, track_title
from infermix.roles.facts import Ceilings, MachineFacts

MACHINE = MachineFacts("cpu", "Test CPU", 1000, 2, ceilings=Ceilings(1e9, {"float32": 1e12}), fingerprint="f1")


def test_the_mix_does_not_change_the_track(make_record) -> None:
    first = track_id(make_record())
    assert first == track_id(make_record(parts={"kv": "dense"}, dtype="bfloat16", run_id="x", state="oom"))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"digest": "m2"}},
        {"device": "cuda"},
        {"environment": {"machine": {"fingerprint": "f2"}}},
        {
            "experiment": {
                "model": {"weights": "dummy"},
                "workload": {"name": "prompts", "options": {"num_requests": 8}},
            }
        },
        {"experiment": {"model": {}, "workload": {"name": "prompts", "options": {"num_requests": 9}}}},
        {"experiment": {"model": {}, "workload": {"name": "prompts", "options": {"num_requests": 8}}, "seed": 1}},
        {"data": {"workload.path": "other content"}},
    ],
    ids=["model", "device", "machine", "weights", "workload", "seed", "data"],
)
def test_what_changes_the_track(make_record, change: dict) -> None:
    assert track_id(make_record()) != track_id(make_record(**change))


def test_the_text_of_an_evaluator_does_not_change_the_track(make_record) -> None:
    assert track_id(make_record()) == track_id(make_record(data={"quality[0].corpus": "a text"}))


def test_title_names_model_machine_and_dummy_weights(make_record) -> None:
    experiment = {
        "model": {"source": "/home/someone/models/llama", "weights": "dummy"},
        "workload": {"name": "synthetic"},
    }
    title = track_title(make_record(model={}, experiment=experiment))
    assert title == "llama (dummy weights), synthetic, cpu (Test CPU)"


def test_environment_is_plain_data_without_names_and_paths() -> None:
    environment = capture_environment(MACHINE, "cpu", ["pytest", "no-such-distribution"])
    text = msgspec.json.encode(environment).decode()
    assert environment["machine"]["fingerprint"] == "f1"
    assert environment["machine"]["matmul_flops_per_s"] == {"float32": 1e12}
    assert {"infermix", "torch", "pytest"} <= environment["packages"].keys()
    assert "no-such-distribution" not in environment["packages"]
    assert "gpu" not in environment
    assert str(Path.home()) not in text
    assert str(Path(__file__).parents[2]) not in text
    for name in (getpass.getuser(), socket.gethostname()):
        assert f'"{name}"' not in text


def test_gpu_state_says_why_it_is_missing() -> None:
    gpu = capture_environment(MACHINE, "cuda")["gpu"]
    assert "error" in gpu or "driver" in gpu


def test_git_state_of_this_checkout() -> None:
    state = git_state()
    assert state == {} or (len(state["commit"]) == 40 and isinstance(state["edited"], bool))


def test_package_versions_are_sorted() -> None:
    names = list(package_versions())
    assert names == sorted(names)
