"""The vLLM engine over a stand-in for vLLM: translation, streaming, ends, aborts, scores, facts and faults."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_vllm
import msgspec
import pytest
import torch
from infermix.cell.sizes import max_num_seqs
from infermix.compose import CellPlan, compose
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.errors import InfermixError, OutOfMemory, Unsupported, UserError
from infermix.failure import classify
from infermix.interleave import both_fit
from infermix.measure.drive import drive
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.engine import EngineContext, ScoreRequest
from infermix.roles.facts import MachineFacts, ResolvedSource
from infermix.roles.request import FinishReason, Request, SamplingParams
from infermix.spec.experiment import ModelSource
from infermix.spec.load import load_experiment
from infermix_vllm.plugin import VllmOptions
from safetensors.torch import save_file

VOCAB, EOS, POSITIONS = 40, 7, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-05,
    "eos_token_id": EOS,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GPU = MachineFacts("cuda", "fake GPU", 2**37, 8, compute_capability=90)
PROMPTS = [(10, 20, 30), (11,), (12, 13, 14, 15, 16)]
Build = Callable[..., Any]


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in as an installed package."""
    package = tmp_path / "site" / "vllm"
    modules = {
        "sampling_params.py": "from vllm import RequestOutputKind",
        "usage/__init__.py": "",
        "usage/usage_lib.py": "from vllm import UsageContext",
        "v1/__init__.py": "",
        "v1/executor/__init__.py": "from vllm import Executor",
    }
    for name, text in {"__init__.py": Path(fake_vllm.__file__).read_text(), **modules}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    import vllm

    yield vllm
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineContext]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    clock = itertools.count(1)

    def make(model: ModelSource | None = None, **given: Any) -> EngineContext:
        source = resolve_source(model or ModelSource(source="tiny.json", weights="dummy"), tmp_path)
        facts = read_model_facts(source, dtype="bfloat16", dummy=source.kind == "dummy")
        settings: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 4, **given}
        return EngineContext(
            source=source, facts=facts, machine=GPU, dtype="bfloat16", parts={}, seed=3,
            clock_ns=lambda: next(clock), **settings,
        )  # fmt: skip

    return make


@pytest.fixture
def build(vllm: ModuleType, context: Callable[..., EngineContext]) -> Build:
    from infermix_vllm.build import build_engine

    return lambda options=None, **given: build_engine(VllmOptions(**(options or {})), context(**given))


class Letters:
    """Token id n is the n-th letter."""

    eos_token_ids = (EOS,)
    bos_token_id = None
    vocab_size = VOCAB

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def request(name: str, prompt: Any = PROMPTS[0], **sampling: Any) -> Request:
    return Request(
        request_id=name, prompt_ids=prompt, sampling=SamplingParams(**{"ignore_eos": True, **sampling})
    )  # fmt: skip


def run(engine: Any, *requests: Request) -> dict[str, Any]:
    """Per request id: tokens, reason, stamps."""
    outputs: dict[str, Any] = {each.request_id: ([], None, []) for each in requests}
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        for event in engine.step():
            tokens, reason, times = outputs[event.request_id]
            assert reason is None, "an event after the end"
            outputs[event.request_id] = (
                [*tokens, *event.token_ids],
                event.finish_reason,
                [*times, event.time_ns],
            )
    return outputs


def greedy(prompt: Any, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_vllm.next_logits(tokens, VOCAB).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": False}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 4}]
)
def test_greedy_tokens_come_one_by_one(build: Build, options: dict[str, Any]) -> None:
    engine = build(options)
    outputs = run(engine, *(request(str(i), prompt, max_new_tokens=3 + i) for i, prompt in enumerate(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        tokens, reason, times = outputs[str(i)]
        assert (tokens, reason) == (greedy(prompt, 3 + i), FinishReason.LENGTH)
        assert times == sorted(set(times))


def test_events_of_one_step_share_its_stamp(build: Build) -> None:
    outputs = run(build(), request("a", max_new_tokens=3), request("b", max_new_tokens=3))
    assert outputs["a"][2] == outputs["b"][2]


def test_the_load_generator_drives_it(build: Build) -> None:
    engine = build()
    repeat = drive(engine, [request(str(i), PROMPTS[i % 3], max_new_tokens=4) for i in range(6)], 2, keep_outputs=6)
    assert [sample.finish_reason for sample in repeat.requests] == ["length"] * 6
    assert [sample.output_ids for sample in repeat.requests] == [greedy(PROMPTS[i % 3], 4) for i in range(6)]
    assert engine.report().counters["steps"] == 12  # three pairs of four tokens


def test_end_of_text_stops_and_is_reported(build: Build) -> None:
    engine = build()
    prompt = next((p,) for p in range(VOCAB) if EOS in greedy((p,), 12))
    tokens = greedy(prompt, 12)
    end = tokens.index(EOS) + 1
    outputs = run(
        engine,
        request("stops", prompt, max_new_tokens=12, ignore_eos=False),
        request("ignores", prompt, max_new_tokens=12),
        request("other", prompt, max_new_tokens=12, stop_token_ids=(tokens[0],)),
        request("late", prompt, max_new_tokens=12, min_new_tokens=12, ignore_eos=False),
    )
    assert outputs["stops"][:2] == (tokens[:end], FinishReason.STOP)
    assert outputs["ignores"][:2] == (tokens, FinishReason.LENGTH)
    assert outputs["other"][:2] == (tokens[:1], FinishReason.STOP)
    assert len(outputs["late"][0]) == 12
    assert EOS not in outputs["late"][0]


def test_ignored_end_of_text_is_not_held_back(build: Build) -> None:
    prompt = next((p,) for p in range(VOCAB) if EOS in greedy((p,), 12))
    outputs = run(build(), request("a", prompt, max_new_tokens=12, min_new_tokens=12))
    assert outputs["a"][0] == greedy(prompt, 12)


def test_a_stop_string_ends_a_request_and_nothing_follows(build: Build) -> None:
    engine = build()
    engine.tokenizer = Letters()
    tokens = greedy(PROMPTS[0], 12)
    stop = Letters().decode(tokens[3:5])
    end = next(i for i in range(12) if stop in Letters().decode(tokens[: i + 1])) + 1
    outputs = run(engine, request("a", max_new_tokens=12, stop=(stop,)), request("b", PROMPTS[1], max_new_tokens=12))
    assert outputs["a"][:2] == (tokens[:end], FinishReason.STOP)
    assert outputs["b"][0] == greedy(PROMPTS[1], 12)
    assert not engine._engine.has_unfinished_requests()


def test_sampling_parameters_are_handed_over(build: Build) -> None:
    engine = build()
    given = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    engine.submit(request("a", max_new_tokens=9, seed=2**64 - 1, stop_token_ids=(4, 3), **given))
    engine.submit(request("greedy", max_new_tokens=9, top_k=5, seed=11, ignore_eos=False, min_new_tokens=2))
    sampled, plain = engine._engine.params["a"], engine._engine.params["greedy"]
    assert {name: getattr(sampled, name) for name in given} == given
    assert (sampled.seed, sampled.max_tokens, sampled.stop_token_ids) == (2**63 - 1, 9, [3, 4])
    assert (plain.temperature, plain.seed, plain.stop_token_ids, plain.min_tokens) == (0.0, None, [EOS], 2)
    assert all(p.output_kind.name == "DELTA" and not p.detokenize for p in (sampled, plain))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), {}, "request a: the prompt is empty"),
        ((1,) * 40, {"max_new_tokens": 9}, "40 prompt tokens and 9 new ones exceed the 48 tokens"),
        ((1, VOCAB), {"max_new_tokens": 1}, f"token id {VOCAB} is not in the vocabulary of {VOCAB}"),
        ((1,), {"max_new_tokens": 0}, "vLLM makes at least one token"),
        ((1,), {"max_new_tokens": 2, "temperature": 0.001}, "does not sample at temperature 0.001"),
        ((1,), {"max_new_tokens": 2, "temperature": 2.5}, "does not sample at temperature 2.5"),
        ((1,), {"max_new_tokens": 2, "stop": ("x",)}, "stop strings need a tokenizer"),
        ((1,), {"max_new_tokens": 2, "min_new_tokens": 1, "stop_token_ids": (3,)}, "holds back end-of-text tokens"),
        ((1,), {"max_new_tokens": 2, "temperature": 1.0, "top_p": 0.0}, "request a: vLLM refuses it: top_p must be"),
    ],
)
def test_requests_that_vllm_would_read_differently_are_refused(
    build: Build, prompt: Any, sampling: Any, message: str
) -> None:
    engine = build()
    with pytest.raises(UserError, match=message):
        engine.submit(request("a", prompt, **sampling))
    assert not engine.has_work


def test_one_id_runs_once(build: Build) -> None:
    engine = build()
    engine.submit(request("a", max_new_tokens=2))
    with pytest.raises(UserError, match="request a: a request with this id is running"):
        engine.submit(request("a", max_new_tokens=2))


def test_reset_aborts_and_the_next_repeat_sees_nothing_of_it(build: Build) -> None:
    engine = build()
    engine.submit(request("a", max_new_tokens=9))
    for _ in range(4):
        engine.step()
    engine.reset()
    assert not engine.has_work
    assert engine.report().counters == {"steps": 0, "prefix_hit_tokens": 0}
    assert run(engine, request("a", max_new_tokens=4))["a"][0] == greedy(PROMPTS[0], 4)


def test_prefix_hits_are_counted_and_emptied_by_reset(build: Build) -> None:
    prompt = tuple(range(20))
    for options, hits in (({"prefix_caching": True, "block_size": 8}, 16), ({}, 0)):
        engine = build(options)
        run(engine, request("a", prompt, max_new_tokens=2))
        run(engine, request("b", prompt, max_new_tokens=2))
        assert engine.report().counters["prefix_hit_tokens"] == hits
        engine.reset()
        run(engine, request("c", prompt, max_new_tokens=2))
        assert engine.report().counters["prefix_hit_tokens"] == 0


def test_preemptions_are_counted_from_the_reset_on(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "preemptions" not in build().report().counters
    engine = build({"log_stats": True})
    assert engine.report().counters["preemptions"] == 0
    monkeypatch.setattr("infermix_vllm.facts.num_preemptions", lambda engine: 5.0)
    assert engine.report().counters["preemptions"] == 2


def test_scores_are_the_models_log_probabilities(build: Build) -> None:
    engine = build()
    requests = [ScoreRequest(tuple(range(5, 25)), 1), ScoreRequest((3, 9, 27), 2)]
    for wanted, score in zip(requests, engine.score(requests), strict=True):
        ids = list(wanted.token_ids)
        rows = [fake_vllm.next_logits(ids[:i], VOCAB).log_softmax(-1) for i in range(wanted.first, len(ids))]
        expected = [float(row[token]) for row, token in zip(rows, ids[wanted.first :], strict=True)]
        assert score.logprobs == pytest.approx(expected)
        assert score.top1 == [int(row.argmax()) for row in rows]
    assert run(engine, request("a", max_new_tokens=3))["a"][0] == greedy(PROMPTS[0], 3)


def test_what_vllm_cannot_score_is_refused(build: Build) -> None:
    engine = build()
    with pytest.raises(Unsupported, match="not under the protocol 'decode'"):
        engine.score([ScoreRequest((1, 2), protocol="decode")])
    with pytest.raises(Unsupported, match="not logits"):
        engine.score([ScoreRequest((1, 2), want_logits=True)])
    engine.score([ScoreRequest((1,) * 48)])  # as long as the cell asked for
    with pytest.raises(UserError, match="vLLM scores at most 48 tokens"):
        engine.score([ScoreRequest((1,) * 49)])
    engine.submit(request("a", max_new_tokens=2))
    with pytest.raises(InfermixError, match="idle"):
        engine.score([ScoreRequest((1, 2))])


def test_the_report_says_what_vllm_chose(build: Build) -> None:
    engine = build({"kv_cache_dtype": "fp8"}, kv_memory_bytes=2**16)
    report = engine.report()
    executed = report.executed["engine"]
    assert (executed["vllm"], executed["class"], executed["model_runner"]) == ("0.26.0", "FakeForCausalLM", "v2")
    assert executed["attention"] == ["FLASH_ATTN 3"]
    assert (executed["cudagraph_mode"], executed["kv_cache_dtype"]) == ("FULL_AND_PIECEWISE", "fp8")
    assert (executed["prefix_caching"], executed["max_num_seqs"]) == (False, 4)
    assert report.graphs == {"mode": "FULL_AND_PIECEWISE", "sizes": [1, 2, 4, 8]}
    assert (report.weight_bytes, report.kv_bytes) == (4 * 8 * 2, 2**16)
    assert report.kv_bytes_per_token == 2**16 / executed["capacity_tokens"]
    assert set(report.setup_s) == {"prepare", "import", "configure", "start", "compile"}
    msgspec.json.encode(executed)  # a record holds it
    assert build({"enforce_eager": True}).report().graphs == {"mode": "NONE", "sizes": []}


def test_close_ends_the_core_once(build: Build) -> None:
    engine = build()
    inner = engine._engine
    engine.close()
    engine.close()
    assert inner.closed


def test_too_little_memory_is_out_of_memory(build: Build) -> None:
    for limits in ({"kv_memory_bytes": 64}, {"kv_memory_fraction": 0.01}):
        with pytest.raises(OutOfMemory, match=r"vLLM 0.26.0: (To serve|No available)") as caught:
            build(**limits)
        assert classify(caught.value, loading=True)[0] == "oom"


def test_a_model_that_vllm_does_not_know_is_a_refusal(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "SUPPORTED", ())
    with pytest.raises(Unsupported, match=r"vLLM 0\.26\.0 refuses this: Model architectures") as caught:
        build()
    assert classify(caught.value, loading=True)[0] == "invalid"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "error"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
    ],
)
def test_a_crash_inside_a_step_is_the_cells_result(
    build: Build, vllm: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, state: str
) -> None:
    engine = build()
    engine.submit(request("a", max_new_tokens=2))
    monkeypatch.setattr(vllm.LLMEngine, "fault", error)
    with pytest.raises(type(error)) as caught:
        engine.step()
    assert classify(caught.value, loading=False)[0] == state
    assert str(error) in classify(caught.value, loading=False)[1]


def test_an_unknown_reason_is_not_guessed() -> None:
    from infermix_vllm.stream import finish_reason

    assert finish_reason("error") is FinishReason.ERROR
    with pytest.raises(InfermixError, match="unknown reason 'repetition'"):
        finish_reason("repetition")


def test_arguments_of_the_engine(context: Callable[..., EngineContext]) -> None:
    from infermix_vllm.build import engine_arguments
    from infermix_vllm.sources import model_files

    cell = context(kv_memory_fraction=0.8)
    files = model_files(cell.source, cell.progress)
    found = engine_arguments(VllmOptions(block_size=32), cell, files)
    expected = {
        "load_format": "dummy", "dtype": "bfloat16", "seed": 3, "max_model_len": 49, "max_num_seqs": 4,
        "block_size": 32, "enable_prefix_caching": False, "gpu_memory_utilization": 0.8, "skip_tokenizer_init": True,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert not {"attention_backend", "quantization", "kv_cache_memory_bytes"} & found.keys()
    full = engine_arguments(VllmOptions(), context(max_model_len=POSITIONS), files)
    assert full["max_model_len"] == POSITIONS
    stated = engine_arguments(VllmOptions(), context(kv_memory_bytes=10**9), files)
    assert stated["kv_cache_memory_bytes"] == 10**9
    assert stated["gpu_memory_utilization"] < 0.1


def test_models_become_directories(context: Callable[..., EngineContext], tmp_path: Path) -> None:
    from infermix_vllm.sources import eos_token_ids, model_files

    def files(model: ModelSource) -> Any:
        cell = context(model)
        return model_files(cell.source, cell.progress)

    shape = files(ModelSource(source="shape:smollm2-135m", weights="dummy"))
    assert shape.load_format == "dummy"
    assert json.loads((shape.directory / "config.json").read_text())["hidden_size"] == 576
    assert shape.directory == files(ModelSource(source="shape:smollm2-135m", weights="dummy")).directory
    assert shape.directory.is_relative_to(tmp_path / "cache")
    assert eos_token_ids(shape, None) == (2,)

    real = tmp_path / "real"
    write_checkpoint(real)
    plain = files(ModelSource(source="real"))
    assert (plain.directory, plain.load_format, plain.config_directory) == (real, "auto", None)
    assert eos_token_ids(plain, Letters()) == (9, EOS)
    changed = files(ModelSource(source="real", config={"rms_norm_eps": 0.5}))
    assert changed.directory == real
    assert json.loads((changed.config_directory / "config.json").read_text())["rms_norm_eps"] == 0.5


def test_a_gguf_is_read_from_its_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infermix_vllm import sources

    monkeypatch.setattr(sources, "converted_gguf", lambda file, progress: tmp_path / f"converted-{file.name}")
    source = ResolvedSource("package:small", "gguf", tmp_path, tmp_path / "small.gguf")
    found = sources.model_files(source, lambda phase, fraction: None)
    assert found == sources.ModelFiles(tmp_path / "converted-small.gguf", "auto")


def write_checkpoint(folder: Path) -> None:
    """The tiny config with weights, and a generation config with an end of its own."""
    folder.mkdir()
    hidden, ffn, kv = 16, 32, 8
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": [9]}')


HEAD = (
    "model: {source: tiny.json, weights: dummy}\n"
    "workload: {use: synthetic, num_requests: 4, input_tokens: 8, output_tokens: 4}\n"
)


def plans(folder: Path, text: str, machine: MachineFacts = GPU) -> list[CellPlan]:
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    (folder / "x.yaml").write_text(HEAD + text)
    return compose(load_experiment(folder / "x.yaml"), load_catalogue(), machine=machine)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_plan_says_how_to_get_it(tmp_path: Path) -> None:
    native, other = plans(tmp_path, "sweep: {engine: [native, vllm]}\n")
    assert native.runs
    assert other.reasons == ("engine 'vllm' needs vllm: pip install vllm",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("engine: vllm\n", None),
        ("engine: vllm\nquality: [{use: perplexity, window: 32}]\n", None),
        (
            "engine: vllm\nquality: [{use: perplexity, window: 32, protocol: decode}]\n",
            "evaluator 'perplexity' needs engine:score_decode, which engine 'vllm' does not provide",
        ),
        (
            "engine: vllm\nquality: [{use: agreement, num_tokens: 16, prompt_tokens: 8, new_tokens: 8}]\n",
            "evaluator 'agreement' needs engine:logits, which engine 'vllm' does not provide",
        ),
        ("engine: vllm\nparts: {kv: paged}\n", "engine 'vllm' takes no part, not kv 'paged'"),
    ],
)
def test_plan_knows_what_vllm_can(vllm: ModuleType, tmp_path: Path, text: str, reason: str | None) -> None:
    (plan,) = plans(tmp_path, text + "dtype: bfloat16\n")
    assert plan.reasons == (() if reason is None else (reason,))


def test_vllm_needs_a_gpu(vllm: ModuleType, tmp_path: Path) -> None:
    (plan,) = plans(tmp_path, "engine: vllm\n", MachineFacts("cpu", "cpu", 2**33, 2))
    assert plan.reasons == ("engine 'vllm' needs device:cuda, this cell runs on cpu (cpu)",)


def test_vllm_is_predicted_to_take_its_share(vllm: ModuleType, tmp_path: Path) -> None:
    rows = (
        "{engine: vllm}",
        "{engine: vllm, limits.kv_memory_bytes: 1000000}",
        "{engine: {use: vllm, quantization: fp8}}",
        "{engine: native}",
    )
    share, limited, small, native = plans(tmp_path, f"sweep: {{include: [{', '.join(rows)}]}}\n")
    assert share.memory is not None
    assert limited.memory is not None
    assert share.memory.total_bytes == pytest.approx(0.9 * GPU.memory_bytes, rel=1e-6)
    assert limited.memory.kv_bytes == 1_000_000
    assert small.memory is not None
    assert small.memory.weights_bytes < share.memory.weights_bytes
    assert not both_fit(share, native)
    assert both_fit(limited, native)


def test_engines_bound_the_sequences_too(vllm: ModuleType, tmp_path: Path) -> None:
    (plan,) = plans(tmp_path, "engine: {use: vllm, max_num_seqs: 2}\n")
    choices = {**plan.parts, Role.ENGINE: plan.engine}
    assert (plan.max_num_seqs, max_num_seqs(choices, None, 100)) == (2, 2)


def test_lossy_options_say_so() -> None:
    component = load_catalogue().find(Role.ENGINE, "vllm").component
    assert component.lossless(VllmOptions())
    assert not component.lossless(VllmOptions(kv_cache_dtype="fp8"))
    assert not component.lossless(VllmOptions(quantization="fp8"))
    assert component.weight_bits(VllmOptions(quantization="fp8")) == 8
    assert component.weight_bits(VllmOptions()) is None
