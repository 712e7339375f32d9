from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.component import Choice, Component, Provenance, Registered, Role
from infermix.roles.engine import EngineContext, ScoreRequest
from infermix.roles.facts import MachineFacts, ModelFacts, ResolvedSource
from infermix.roles.quantizer import QuantizationReport
from infermix.roles.request import FinishReason, Request, SamplingParams
from infermix_transformers.engine import TransformersEngine, build_engine
from infermix_transformers.plugin import TransformersOptions
from infermix_transformers.scoring import score_prefill

PROMPTS = [(10, 20, 30, 40, 50), (60,), (70, 80, 90)]


@pytest.fixture
def make_engine(llama: Any, byte_tokenizer: Any, ticks: Any) -> Any:
    def make(model: Any = llama, eos: Any = (2,), tokenizer: Any = byte_tokenizer, **options: Any) -> Any:
        return TransformersEngine(
            model=model,
            eos_token_ids=eos,
            tokenizer=tokenizer,
            options=TransformersOptions(**options),
            device="cpu",
            max_positions=128,
            clock_ns=ticks,
        )

    return make


def request(name: Any, prompt: Any, **sampling: Any) -> Any:
    return Request(request_id=name, prompt_ids=prompt, sampling=SamplingParams(**sampling))


def run(engine: Any, *requests: Any) -> Any:
    """Tokens, finish reason and time stamps per request id."""
    outputs = {each.request_id: SimpleNamespace(tokens=[], reason=None, times=[]) for each in requests}
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        for event in engine.step():
            output = outputs[event.request_id]
            assert output.reason is None, "a token after the end"
            output.tokens.extend(event.token_ids)
            output.times.append(event.time_ns)
            output.reason = event.finish_reason
    return outputs


@torch.no_grad()
def greedy(model: Any, prompt: Any, num_tokens: Any) -> Any:
    """The textbook: a full forward for every token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("options", [{}, {"cache": "static"}, {"attn_implementation": "eager"}, {"batch_size": 2}])
def test_greedy_tokens_equal_full_forwards(options: Any, make_engine: Any, llama: Any) -> None:
    engine = make_engine(**options)
    requests = [
        request(str(i), prompt, max_new_tokens=4 + 3 * i, ignore_eos=True) for i, prompt in enumerate(PROMPTS)
    ]
    outputs = run(engine, *requests)
    for i, prompt in enumerate(PROMPTS):
        assert outputs[str(i)].tokens == greedy(llama, prompt, 4 + 3 * i)
        assert outputs[str(i)].reason is FinishReason.LENGTH


def test_every_token_has_the_stamp_of_its_own_step(make_engine: Any) -> None:
    engine = make_engine()
    outputs = run(engine, *(request(str(i), p, max_new_tokens=5, ignore_eos=True) for i, p in enumerate(PROMPTS)))
    assert [outputs[str(i)].times for i in range(3)] == [[1, 2, 3, 4, 5]] * 3


def test_a_row_ends_at_eos_and_the_others_go_on(make_engine: Any, llama: Any) -> None:
    tokens = greedy(llama, PROMPTS[0], 8)
    eos = tokens[3]
    end = tokens.index(eos) + 1
    engine = make_engine(eos=(eos,))
    outputs = run(
        engine,
        request("stops", PROMPTS[0], max_new_tokens=8),
        request("long", PROMPTS[2], max_new_tokens=8),
    )
    assert outputs["stops"].tokens == tokens[:end]
    assert outputs["stops"].reason is FinishReason.STOP
    other = greedy(llama, PROMPTS[2], 8)
    assert outputs["long"].tokens == (other[: other.index(eos) + 1] if eos in other else other)


def test_ignore_eos_runs_to_the_length_but_stop_tokens_still_stop(make_engine: Any, llama: Any) -> None:
    tokens = greedy(llama, PROMPTS[0], 8)
    engine = make_engine(eos=(tokens[0],))
    ignoring = run(engine, request("a", PROMPTS[0], max_new_tokens=8, ignore_eos=True))["a"]
    assert (ignoring.tokens, ignoring.reason) == (tokens, FinishReason.LENGTH)
    stop = tokens[4]
    first = tokens.index(stop) + 1
    stopping = run(engine, request("b", PROMPTS[0], max_new_tokens=8, ignore_eos=True, stop_token_ids=(stop,)))["b"]
    assert (stopping.tokens, stopping.reason) == (tokens[:first], FinishReason.STOP)


def test_min_new_tokens_keeps_eos_away(make_engine: Any, llama: Any) -> None:
    eos = greedy(llama, PROMPTS[0], 1)[0]
    engine = make_engine(eos=(eos,))
    output = run(engine, request("a", PROMPTS[0], max_new_tokens=8, min_new_tokens=5))["a"]
    assert eos not in output.tokens[:5]
    assert len(output.tokens) >= 5


def test_a_stop_string_ends_with_the_token_that_completes_it(
    make_engine: Any, llama: Any, byte_tokenizer: Any
) -> None:
    tokens = greedy(llama, PROMPTS[0], 30)
    text = byte_tokenizer.decode(tokens)
    stop = next(text[i : i + 2] for i in range(3, len(text) - 2) if text[i : i + 2].isascii())
    expected = next(n for n in range(1, 31) if stop in byte_tokenizer.decode(tokens[:n]))
    output = run(make_engine(), request("a", PROMPTS[0], max_new_tokens=30, stop=(stop,), ignore_eos=True))["a"]
    assert (len(output.tokens), output.reason) == (expected, FinishReason.STOP)


def test_stop_strings_need_a_tokenizer(make_engine: Any) -> None:
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        make_engine(tokenizer=None).submit(request("a", (5,), stop=("x",)))


def test_sampling_is_repeatable_and_depends_on_the_seed(make_engine: Any) -> None:
    engine = make_engine()

    def draw(seed: Any) -> Any:
        return run(engine, request("a", PROMPTS[0], max_new_tokens=20, temperature=1.0, seed=seed))["a"].tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_top_k_one_is_greedy(make_engine: Any, llama: Any) -> None:
    engine = make_engine()
    output = run(engine, request("a", PROMPTS[0], max_new_tokens=6, temperature=2.0, top_k=1, ignore_eos=True))
    assert output["a"].tokens == greedy(llama, PROMPTS[0], 6)


def test_different_sampling_never_shares_a_call(make_engine: Any, llama: Any) -> None:
    engine = make_engine()
    outputs = run(
        engine,
        request("greedy", PROMPTS[0], max_new_tokens=6, ignore_eos=True),
        request("hot", PROMPTS[1], max_new_tokens=6, temperature=1.5, ignore_eos=True),
        request("greedy too", PROMPTS[2], max_new_tokens=6, ignore_eos=True),
    )
    assert outputs["greedy"].tokens == greedy(llama, PROMPTS[0], 6)
    assert outputs["greedy too"].tokens == greedy(llama, PROMPTS[2], 6)
    assert engine.report().counters["generate_calls"] == 2


def test_sampling_defaults_of_the_checkpoint_do_not_leak_in(make_engine: Any, llama: Any) -> None:
    from transformers import GenerationConfig

    expected = greedy(llama, PROMPTS[0], 12)
    llama.generation_config = GenerationConfig(repetition_penalty=5.0, no_repeat_ngram_size=1, do_sample=True)
    output = run(make_engine(), request("a", PROMPTS[0], max_new_tokens=12, ignore_eos=True))["a"]
    assert output.tokens == expected
    assert len(set(expected)) < len(expected), "without a repetition this test shows nothing"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_scores_equal_the_full_forward(cache: Any, make_engine: Any, llama: Any) -> None:
    ids = tuple(torch.arange(3, 40).tolist())
    with torch.no_grad():
        logits = llama(torch.tensor([ids]), use_cache=False).logits[0]
    expected = logits.log_softmax(-1)[4:-1].gather(1, torch.tensor(ids[5:])[:, None])[:, 0]
    engine = make_engine(cache=cache)
    prefill, decode = engine.score(
        [ScoreRequest(ids, 5, protocol, want_logits=True) for protocol in ("prefill", "decode")]
    )
    for score in (prefill, decode):
        torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(score.logits, logits[4:-1], rtol=1e-4, atol=1e-4)
        assert score.top1 == logits[4:-1].argmax(-1).tolist()


def test_models_that_always_return_every_row_are_scored_alike(llama: Any) -> None:
    class EveryRow(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return llama(input_ids=input_ids, use_cache=use_cache)

    asked = ScoreRequest(tuple(range(3, 20)), 9)
    with torch.no_grad():
        found, expected = score_prefill(EveryRow(), asked, "cpu"), score_prefill(llama, asked, "cpu")
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert len(found.logprobs) == 8


def test_scoring_whole_sequences_from_their_second_token(make_engine: Any) -> None:
    for protocol in ("prefill", "decode"):
        (score,) = make_engine().score([ScoreRequest((7, 8, 9), 1, protocol)])
        assert len(score.logprobs) == 2
        assert score.logits is None


@pytest.mark.parametrize(("ids", "first"), [((5, 6), 0), ((5, 6), 2), (tuple(range(3, 200)), 1)])
def test_what_cannot_be_scored_is_refused(ids: Any, first: Any, make_engine: Any) -> None:
    with pytest.raises(UserError, match="cannot score"):
        make_engine().score([ScoreRequest(ids, first)])


def test_bad_requests_are_refused(make_engine: Any) -> None:
    engine = make_engine()
    with pytest.raises(UserError, match="the prompt is empty"):
        engine.submit(request("a", ()))
    with pytest.raises(UserError, match="exceed the model's 128 positions"):
        engine.submit(request("a", (5,) * 100, max_new_tokens=29))
    assert not engine.has_work


def test_the_report_says_what_ran(make_engine: Any, llama: Any) -> None:
    engine = make_engine(cache="static", attn_implementation="eager")
    run(engine, *(request(str(i), p, max_new_tokens=3, ignore_eos=True) for i, p in enumerate(PROMPTS)))
    report = engine.report()
    assert report.executed["attention"] == {"implementation": "eager"}
    assert report.executed["kv"] == {"cache": "StaticCache"}
    assert report.executed["decoder"]["compiled"] is False
    assert report.counters == {"generate_calls": 1, "prompt_tokens": 9, "padding_tokens": 6}
    assert report.weight_bytes == 4 * sum(p.numel() for p in llama.parameters())
    # 2 layers, K and V, 3 rows, 2 KV heads of 8, 4 bytes, at least the 7 positions that were written.
    assert report.kv_bytes >= 2 * 2 * 3 * 2 * 8 * 4 * 7
    engine.reset()
    assert engine.report().counters["generate_calls"] == 0


def test_reset_forgets_waiting_requests_and_close_lets_go_of_the_model(make_engine: Any) -> None:
    engine = make_engine()
    engine.submit(request("a", (5,), max_new_tokens=4))
    engine.reset()
    assert not engine.has_work
    engine.close()
    with pytest.raises((AttributeError, TypeError)):
        engine.score([ScoreRequest((5, 6), 1)])


def test_compile_needs_a_static_cache() -> None:
    with pytest.raises(ValueError, match="needs cache: static"):
        TransformersOptions(compile=True)


class Doubling:
    """A quantizer that leaves a mark: the output layer's weights are doubled."""

    def load_arguments(self) -> Any:
        return {}

    def apply(self, model: Any, context: Any) -> Any:
        model.lm_head.weight.data *= 2
        return QuantizationReport("doubling", 32.0, 0, {"lm_head": "torch"})


def test_a_saved_model_is_loaded_and_handed_to_the_quantizer(llama: Any, tmp_path: Any, ticks: Any) -> None:
    llama.save_pretrained(tmp_path)
    component = Component(name="doubling", role=Role.QUANTIZER, summary="", build=lambda options, context: Doubling())
    choice = Choice(Registered(component, Provenance("test", "0", "test")), None)
    context = EngineContext(
        source=ResolvedSource("tiny", "safetensors", tmp_path, config=llama.config.to_dict()),
        facts=ModelFacts("tiny", "llama", "LlamaForCausalLM", "float32", 259, 32, 128, (), ()),
        machine=MachineFacts("cpu", "test", 1, 1),
        dtype="float32",
        parts={Role.QUANTIZER: choice},
        max_model_len=128,
        max_num_seqs=4,
        seed=0,
        clock_ns=ticks,
        base=Path(),
    )
    engine = build_engine(TransformersOptions(), context)
    assert engine.tokenizer is None
    assert engine.report().executed["quantizer"]["method"] == "doubling"
    assert set(engine.report().setup_s) == {"load", "quantize"}
    ids = (7, 8, 9, 10)
    (score,) = engine.score([ScoreRequest(ids, 1, want_logits=True)])
    with torch.no_grad():
        expected = 2 * llama(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    torch.testing.assert_close(score.logits, expected, rtol=1e-4, atol=1e-4)


def test_listing_the_plugins_imports_nothing_heavy() -> None:
    code = (
        "import sys, infermix_transformers.plugin as t, infermix_lm_eval.plugin as l, infermix.quality.components;"
        "t.infermix_engine(); l.infermix_evaluator();"
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'datasets') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
