"""Why steps are not captured: said before anything is, or when the model itself waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infermix.engine import capture
from infermix.errors import Unsupported
from infermix.plugins import Catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.facts import MachineFacts
from infermix.toolkit.conformance.component import example_model

H200 = MachineFacts("cuda", "NVIDIA H200", 141 << 30, 132, compute_capability=90)


def assembly(catalogue: Catalogue, attention: str = "triton", kv: str = "paged", **options: Any) -> Any:
    def chosen(role: Role, name: str) -> Choice:
        registered = catalogue.find(role, name)
        return Choice(registered, registered.component.options())

    parts = {Role.ATTENTION: chosen(Role.ATTENTION, attention), Role.KV: chosen(Role.KV, kv)}
    return SimpleNamespace(
        device=torch.device("cuda"),
        options=SimpleNamespace(**{"graphs": "auto", "mixed_graph_tokens": None, **options}),
        context=SimpleNamespace(
            parts=parts, transforms=(), facts=example_model(), machine=H200, progress=lambda phase, fraction: None
        ),
    )


def mixed_reason(build: Any, max_tokens: int = 64, fixed_rows: bool = False) -> str | None:
    space: Any = SimpleNamespace(fixed_rows=fixed_rows)
    return capture._why_no_mixed(build, space, max_tokens)


def test_triton_attention_over_blocks_is_captured_at_any_lengths(catalogue: Catalogue) -> None:
    build = assembly(catalogue)
    assert capture.why_not_captured(build, recompute=False) is None
    assert mixed_reason(build) is None


@pytest.mark.parametrize(
    ("parts", "given", "reason"),
    [
        ({"attention": "sdpa"}, {}, "attention 'sdpa' needs query lengths on the host"),
        ({"kv": "dense"}, {}, "kv 'dense' needs query lengths on the host"),
        ({}, {"fixed_rows": True}, "a fixed row of a captured batch"),
        ({}, {"max_tokens": 8}, "the device takes longer for 16 tokens"),
        ({"mixed_graph_tokens": 0}, {"max_tokens": 0}, "switched off by the experiment"),
    ],
    ids=["attention", "layout", "fixed rows", "large model", "off"],
)
def test_mixed_steps_run_eagerly_for_a_reason(
    catalogue: Catalogue, parts: dict[str, Any], given: dict[str, Any], reason: str
) -> None:
    assert reason in (mixed_reason(assembly(catalogue, **parts), **given) or "")


@pytest.mark.parametrize(
    ("num_parameters", "budget", "sizes"),
    [
        (8_000_000_000, 2048, [256, 512, 1024, 2048]),
        (8_000_000_000, 1536, [256, 512, 1024, 1536]),
        (8_000_000_000, 100, [256]),
        (8_000_000_000, 1 << 20, [256, 512, 1024, 2048, 4096, 8192]),
        (8_000_000_000, None, [256]),
        (135_000_000, 2048, [8192]),
    ],
)
def test_larger_steps_are_tried_up_to_what_the_scheduler_makes(
    catalogue: Catalogue, num_parameters: int, budget: int | None, sizes: list[int]
) -> None:
    build = assembly(catalogue)
    build.context.facts = SimpleNamespace(num_parameters=num_parameters)
    options = SimpleNamespace() if budget is None else SimpleNamespace(max_num_batched_tokens=budget)
    build.context.parts[Role.SCHEDULER] = SimpleNamespace(options=options)
    assert capture._sizes_to_try(build) == sizes


def test_larger_steps_are_given_up_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    tried = []

    def attempt(sizes: list[int]) -> dict[str, Any]:
        tried.append(sizes)
        if sizes[-1] > room:
            raise torch.OutOfMemoryError("out of memory")
        return {"tokens": sizes[-1]}

    room = 2048
    assert capture._within_memory(attempt, [256, 512, 1024]) == {"tokens": 1024}
    room = 256
    told = capture._within_memory(attempt, [256, 512, 1024])
    assert told == {"tokens": 256, "larger": "no memory for larger steps"}
    assert tried == [[256, 512, 1024], [256, 512, 1024], [256]]
    with pytest.raises(torch.OutOfMemoryError):  # what was asked for, or what surely pays
        capture._within_memory(attempt, [512])


class Failing:
    """Graphs whose second step fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def capture_all(self) -> Iterator[float]:
        yield 0.5
        raise self._error


def test_a_model_that_waits_for_the_device_runs_eagerly_and_says_so(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs: Any = Failing(RuntimeError("called a synchronizing CUDA operation\nmore"))
    reason = capture._captured_all(assembly(catalogue), "capture", graphs)
    assert reason == "the model cannot be captured: called a synchronizing CUDA operation"


def test_running_out_of_memory_is_no_such_reason(catalogue: Catalogue) -> None:
    graphs: Any = Failing(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        capture._captured_all(assembly(catalogue), "capture", graphs)


def own_work(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, outcome: Any, **options: Any) -> Any:
    """What a decoder captures when capturing has that outcome: an error, or what a replay fills."""

    def captured(work: Any, pool: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        pools.append(pool)
        return SimpleNamespace(replay="replay", pool=lambda: "pool"), outcome

    pools: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(capture, "captured", captured)
    capturing = capture.DecoderCapture(assembly(catalogue, **options))
    return [capturing(lambda: None) for _ in range(2)], pools


def test_work_of_a_decoder_is_captured_into_one_pool(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    found, pools = own_work(catalogue, monkeypatch, "result")
    assert found == [("replay", "result")] * 2
    assert pools == [None, "pool"]


@pytest.mark.parametrize(
    ("outcome", "options", "reason"),
    [
        (RuntimeError("called a synchronizing operation\nmore"), {}, "work cannot be captured: called a synchr"),
        ("result", {"graphs": "off"}, "switched off by the experiment"),
    ],
    ids=["waits", "off"],
)
def test_work_of_a_decoder_that_is_not_captured(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, outcome: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        own_work(catalogue, monkeypatch, outcome, **options)


def test_running_out_of_memory_is_no_reason_for_a_decoder(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        own_work(catalogue, monkeypatch, torch.OutOfMemoryError("out of memory"))
