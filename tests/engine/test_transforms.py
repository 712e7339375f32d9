"""Model transforms in the native engine: order, proof, reports, and nothing compiled while tokens are made."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from infermix.errors import Unsupported, WrongResult
from infermix.plugins import Catalogue
from infermix.roles.component import Choice, Component, Provenance, Registered, Role
from infermix.roles.request import Request, SamplingParams
from infermix.roles.transform import TransformContext, TransformReport

Build = Callable[..., Any]


def generate(engine: Any, num_requests: int = 9, seed: int = 0) -> dict[str, list[int]]:
    """Greedy tokens of prompts of many lengths, which join while others decode."""
    rng = random.Random(seed)
    tokens: dict[str, list[int]] = {}
    for number in range(num_requests):
        prompt = tuple(rng.randrange(6, 96) for _ in range(rng.randrange(1, 60)))
        sampling = SamplingParams(max_new_tokens=rng.randrange(1, 9), ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=sampling))
        tokens[str(number)] = []
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


@pytest.fixture
def compiled(catalogue: Catalogue) -> Callable[..., tuple[Choice, ...]]:
    def choose(**options: Any) -> tuple[Choice, ...]:
        registered = catalogue.find(Role.TRANSFORM, "compile")
        return (Choice(registered, registered.component.options(**{"backend": "eager", **options})),)

    return choose


class Scaled:
    """Multiplies the last norm's weights: harmless with factor 1, wrong otherwise."""

    def __init__(self, stage: str, factor: float = 1.0, journal: list[str] | None = None) -> None:
        self.stage, self._factor = stage, factor
        self._journal = journal if journal is not None else []

    def apply(self, model: Any, context: TransformContext) -> TransformReport:
        with torch.no_grad():
            model.model.norm.weight.mul_(self._factor)
        kinds = {type(module).__name__ for module in model.modules()}
        self._journal.append(f"{self.stage}, quantized: {any('Quant' in kind or 'Rtn' in kind for kind in kinds)}")
        return TransformReport(name="scaled", replaced={"norm": 1}, verified={"norm": 0.0}, notes=(context.dtype,))


def scaled(stage: str, factor: float = 1.0, journal: list[str] | None = None, **fields: Any) -> Choice:
    component = Component(
        name="scaled",
        role=Role.TRANSFORM,
        summary="for tests",
        build=lambda options, context: Scaled(stage, factor, journal),
        **fields,
    )
    return Choice(Registered(component, Provenance("test", "0", "test")), component.options())


@pytest.mark.parametrize("kv", ["dense", ("paged", {"block_size": 4})])
def test_compiled_layers_give_the_same_tokens_and_compile_in_setup_only(
    build_engine: Build, compiled: Callable[..., tuple[Choice, ...]], kv: Any
) -> None:
    expected = generate(build_engine({"kv": kv}))
    chunked = ("continuous", {"max_num_batched_tokens": 16, "chunked": True})
    engine = build_engine({"kv": kv, "scheduler": chunked}, transforms=compiled())
    before = engine.report().counters["compiles"]
    assert before > 0
    assert generate(engine) == expected
    assert engine.report().counters["compiles"] == before


def test_without_dynamic_shapes_compiling_in_the_window_is_counted(
    build_engine: Build, compiled: Callable[..., tuple[Choice, ...]]
) -> None:
    engine = build_engine(transforms=compiled(dynamic=False))
    before = engine.report().counters["compiles"]
    tokens = generate(engine, 3)
    assert engine.report().counters["compiles"] > before
    assert tokens == generate(build_engine(), 3)


def test_the_report_says_what_was_compiled(build_engine: Build, compiled: Callable[..., tuple[Choice, ...]]) -> None:
    report = build_engine(transforms=compiled()).report()
    (entry,) = report.executed["transforms"]
    assert entry["name"] == "compile"
    assert entry["class"].endswith("CompileTransform")
    assert entry["replaced"] == {"decoder layer": 2, "final norm": 1}
    assert entry["stage"] == "after_quantizer"
    assert {"transform_compile", "joint", "warm", "reference"} <= set(report.setup_s)
    assert report.self_check["reference"].endswith("of the model as loaded")


def test_without_transforms_nothing_is_reported(build_engine: Build) -> None:
    report = build_engine().report()
    assert "transforms" not in report.executed
    assert "warm" not in report.setup_s


@pytest.mark.full
def test_generated_code_gives_the_same_tokens(
    build_engine: Build, compiled: Callable[..., tuple[Choice, ...]]
) -> None:
    engine = build_engine(transforms=compiled(backend="inductor"))
    before = engine.report().counters["compiles"]
    assert generate(engine) == generate(build_engine())
    assert engine.report().counters["compiles"] == before


def test_stages_stand_around_the_quantizer(build_engine: Build) -> None:
    journal: list[str] = []
    choices = (scaled("after_quantizer", 1.0, journal), scaled("before_quantizer", 1.0, journal))
    report = build_engine({"quantizer": "rtn"}, transforms=choices).report()
    assert journal == ["before_quantizer, quantized: False", "after_quantizer, quantized: True"]
    assert [entry["stage"] for entry in report.executed["transforms"]] == ["before_quantizer", "after_quantizer"]
    assert report.self_check["reference"].endswith("of the quantized model")


@pytest.mark.parametrize("stage", ["before_quantizer", "after_quantizer"])
def test_a_transform_that_changes_the_logits_is_found(build_engine: Build, stage: str) -> None:
    with pytest.raises(WrongResult, match="self-check failed"):
        build_engine(transforms=(scaled(stage, 1.01),))


def test_a_wrong_transform_behind_a_lossy_quantizer_is_found(build_engine: Build) -> None:
    with pytest.raises(WrongResult, match="self-check failed"):
        build_engine({"quantizer": "rtn"}, transforms=(scaled("after_quantizer", 1.01),))


def test_memory_of_the_weights_counts_what_transforms_leave(build_engine: Build) -> None:
    class Padded(Scaled):
        def apply(self, model: Any, context: TransformContext) -> TransformReport:
            model.register_buffer("padding", torch.zeros(1000))
            return TransformReport(name="scaled", replaced={"padding": 1})

    plain = build_engine().report().weight_bytes
    choice = scaled("before_quantizer")
    component = choice.component
    padded = Component(
        name="scaled", role=component.role, summary="-", build=lambda options, context: Padded("before_quantizer")
    )
    choice = Choice(Registered(padded, choice.registered.provenance), choice.options)
    assert build_engine(transforms=(choice,)).report().weight_bytes == plain + 4000


def test_a_model_without_a_list_of_layers_is_refused(compiled: Callable[..., tuple[Choice, ...]]) -> None:
    from infermix.toolkit.conformance import example_model

    (choice,) = compiled()
    transform = choice.component.build(choice.options, None)
    context = TransformContext(device="cpu", dtype="float32", seed=0, facts=example_model(), max_num_seqs=1)
    with pytest.raises(Unsupported, match="no list of 2 layers"):
        transform.apply(torch.nn.Sequential(torch.nn.Linear(4, 4)), context)
