from __future__ import annotations

import copy
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import lm_eval
from infermix.engine.tokenizer import HfTokenizer
from infermix.errors import UserError
from infermix.roles.engine import ScoreRequest
from infermix_lm_eval.adapter import EngineLM, sampling_params
from infermix_lm_eval.evaluator import LmEvalEvaluator
from infermix_lm_eval.local_tasks import all_local, find_tasks, write_overlays
from infermix_lm_eval.plugin import LmEvalOptions
from infermix_transformers.engine import TransformersEngine
from infermix_transformers.plugin import TransformersOptions
from lm_eval.tasks import TaskManager

DATA = Path(__file__).parents[1] / "data" / "lm_eval"
TASKS = ("tiny_choice", "tiny_text", "tiny_ask")


@pytest.fixture(autouse=True)
def _own_dataset_cache(tmp_path: Any, monkeypatch: Any) -> Any:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="session")
def hf_tokenizer() -> Any:
    """Bytes as tokens, with the ids that `ByteTokenizer` has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{characters[byte]: byte + 3 for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


@pytest.fixture
def engine(llama: Any, hf_tokenizer: Any, ticks: Any) -> Any:
    return TransformersEngine(
        model=llama,
        eos_token_ids=(2,),
        tokenizer=HfTokenizer(hf_tokenizer, "tiny"),
        options=TransformersOptions(batch_size=3),
        device="cpu",
        max_positions=128,
        clock_ns=ticks,
    )


@pytest.fixture
def task_manager(tmp_path: Any) -> Any:
    write_overlays(find_tasks(DATA), tmp_path)
    return TaskManager(include_path=[str(DATA), str(tmp_path)], include_defaults=False)


@pytest.fixture
def hf_results(llama: Any, hf_tokenizer: Any, task_manager: Any) -> Any:
    """lm-eval's own Hugging Face model on the same weights; `max_length` 48 makes some inputs too long."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=copy.deepcopy(llama), tokenizer=hf_tokenizer, max_length=48, batch_size=2)
    return lm_eval.simple_evaluate(
        model=model,
        tasks=list(TASKS),
        task_manager=task_manager,
        num_fewshot=2,
        bootstrap_iters=0,
        fewshot_random_seed=0,
    )


def evaluate(engine: Any, make_context: Any, **options: Any) -> Any:
    settings = {"tasks": TASKS, "include_path": str(DATA), "max_length": 48, **options}
    return LmEvalEvaluator(LmEvalOptions(**settings), make_context()).evaluate(engine)


def test_results_equal_those_of_lm_evals_own_model(engine: Any, evaluator_context: Any, hf_results: Any) -> None:
    metrics = evaluate(engine, evaluator_context, num_fewshot=2)
    for metric in metrics:
        task, _, name = metric.name.partition("[")[0].partition(".")
        expected = hf_results["results"][task]
        assert metric.value == pytest.approx(expected[f"{name},none"], rel=1e-4), metric.name
    assert len(metrics) == 5


def test_every_answer_equals_that_of_lm_evals_own_model(engine: Any, hf_results: Any) -> None:
    model = EngineLM(engine, engine.tokenizer, max_length=48, batch_size=4)
    answers: dict[str, Any] = {"tiny_choice": model.loglikelihood, "tiny_text": model.loglikelihood_rolling}
    for task, ask in answers.items():
        for item in hf_results["samples"][task]:
            found = ask([_Instance(tuple(arguments)) for arguments in item["arguments"]])
            for answer, (expected,) in zip(found, item["resps"], strict=True):
                assert answer == pytest.approx(expected, rel=1e-4)
    texts = [item["arguments"][0] for item in hf_results["samples"]["tiny_ask"]]
    expected = [item["resps"][0][0] for item in hf_results["samples"]["tiny_ask"]]
    assert model.generate_until([_Instance(tuple(each)) for each in texts]) == expected
    assert model.num_truncated > 0


class _Instance:
    def __init__(self, args: Any) -> None:
        self.args = args


def test_names_versions_and_samples(engine: Any, evaluator_context: Any) -> None:
    found = {each.name: each for each in evaluate(engine, evaluator_context, limit=3)}
    choice = found["tiny_choice.acc[fewshot=0,limit=3,bos=none,version=1.0]"]
    assert (choice.unit, choice.better) == ("ratio", "higher")
    assert len(choice.samples) == 3
    assert choice.stderr == pytest.approx(statistics.stdev(choice.samples) / math.sqrt(3))
    assert choice.value == pytest.approx(sum(choice.samples) / 3)
    assert [len(row) for row in choice.details["log_likelihoods"]] == [3, 3, 3]
    assert choice.details["num_items"] == 3
    text = found["tiny_text.word_perplexity[fewshot=0,limit=3,bos=none,version=2.0]"]
    assert (text.unit, text.better, text.stderr) == ("word_perplexity", "lower", None)
    assert len(text.samples) == 3
    assert all(sample > 0 for sample in text.samples)
    assert "log_likelihoods" not in found["tiny_ask.exact_match[fewshot=0,limit=3,bos=none,version=1.0]"].details


def test_bos_starts_every_prompt(table_engine: Any, copycat: Any, byte_tokenizer: Any) -> None:
    engine = table_engine(copycat)
    model = EngineLM(engine, byte_tokenizer, max_length=48, batch_size=4, add_bos=True)
    model.loglikelihood([_Instance(("ab", "c")), _Instance(("", "d"))])
    bos = byte_tokenizer.bos_token_id
    assert sorted(engine.scored, key=lambda each: each.first) == [
        ScoreRequest((bos, *byte_tokenizer.encode("d")), 1),
        ScoreRequest((bos, *byte_tokenizer.encode("abc")), 3),
    ]


def test_log_likelihood_and_greedy_flag_by_hand(table_engine: Any, copycat: Any, byte_tokenizer: Any) -> None:
    model = EngineLM(table_engine(copycat), byte_tokenizer, max_length=48, batch_size=1)
    short, same, other = model.loglikelihood(
        [_Instance(("a", "a")), _Instance(("xa", "aa")), _Instance(("xxa", "ab"))]
    )
    assert short == (pytest.approx(-math.log(2)), True)
    assert same == (pytest.approx(-2 * math.log(2)), True)
    assert other == (pytest.approx(-math.log(2) - math.log(2 * 258)), False)


def test_unknown_tasks_are_refused_with_the_nearest_name(engine: Any, evaluator_context: Any) -> None:
    # A name that is not local makes lm-eval index its own tasks too: patch that away, it takes seconds.
    folder = LmEvalOptions(tasks=("tiny_choise",), include_path=str(DATA))
    evaluator = LmEvalEvaluator(folder, evaluator_context())
    manager = TaskManager(include_path=str(DATA), include_defaults=False)
    with pytest.raises(UserError, match=r"no task called 'tiny_choise' \(did you mean 'tiny_choice'\?\)"):
        evaluator._refuse_unknown(manager)


def test_a_missing_data_file_is_named(tmp_path: Any, engine: Any, evaluator_context: Any) -> None:
    (tmp_path / "broken.yaml").write_text((DATA / "choice.yaml").read_text())
    with pytest.raises(UserError, match=r"broken\.yaml: dataset_kwargs\.data_files: there is no data file"):
        evaluate(engine, evaluator_context, tasks=("tiny_choice",), include_path=str(tmp_path))


@pytest.mark.parametrize(("content", "message"), [("a: [", "not a readable task file"), (None, "no such folder")])
def test_bad_task_folders_are_refused(content: Any, message: Any, tmp_path: Any) -> None:
    folder = tmp_path / "tasks"
    if content:
        folder.mkdir()
        (folder / "x.yaml").write_text(content)
    with pytest.raises(UserError, match=message):
        list(find_tasks(folder))


def test_lm_evals_own_tasks_are_indexed_only_when_they_are_needed(tmp_path: Any) -> None:
    (tmp_path / "a.yaml").write_text("task: a\ntag: [letters, all]\n")
    (tmp_path / "g.yaml").write_text("group: g\ntask: [a, {task: hellaswag}]\n")
    tasks = list(find_tasks(tmp_path))
    assert all_local(["a", "letters"], tasks[:1])
    assert not all_local(["a", "hellaswag"], tasks[:1])
    assert not all_local(["g"], tasks)


def test_functions_in_task_files_are_not_run_to_find_them(tmp_path: Any) -> None:
    (tmp_path / "x.yaml").write_text("task: mine\nprocess_docs: !function nowhere.nothing\n")
    assert [task.name for task in find_tasks(tmp_path)] == ["mine"]


def test_data_that_cannot_be_loaded_is_a_user_error(tmp_path: Any, engine: Any, evaluator_context: Any) -> None:
    text = (DATA / "choice.yaml").read_text().replace("choice.jsonl", "bad.jsonl")
    (tmp_path / "x.yaml").write_text(text)
    (tmp_path / "bad.jsonl").write_text("{not json\n")
    with pytest.raises(UserError, match="tiny_choice cannot be loaded"):
        evaluate(engine, evaluator_context, tasks=("tiny_choice",), include_path=str(tmp_path))


def test_generation_settings_without_a_counterpart_are_refused() -> None:
    with pytest.raises(UserError, match="num_beams"):
        sampling_params({"until": ["x"], "num_beams": 4}, seed=0)
    assert sampling_params({"until": ["x"], "num_beams": 1}, seed=0).stop == ("x",)


def test_greedy_tasks_stay_greedy_whatever_their_temperature() -> None:
    sampling = sampling_params({"until": "x", "do_sample": False, "temperature": 0.7, "max_gen_toks": 5}, 3)
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop) == (0.0, 5, ("x",))
    assert sampling_params({"do_sample": True}, 3).temperature == 1.0
    sampled = sampling_params({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, 3)
    assert (sampled.temperature, sampled.top_p, sampled.seed) == (0.7, 0.9, 3)


def test_a_prompt_needs_room_beside_its_new_tokens(engine: Any) -> None:
    model = EngineLM(engine, engine.tokenizer, max_length=48, batch_size=4)
    with pytest.raises(UserError, match="leave no room"):
        model.generate_until([_Instance(("hello", {"until": ["x"], "max_gen_toks": 48}))])


def test_the_shipped_example_task_works(tmp_path: Any, engine: Any, evaluator_context: Any) -> None:
    experiments = Path(__file__).parents[2] / "experiments" / "tasks"
    (tmp_path / "task.yaml").write_text((experiments / "hellaswag_local.yaml").read_text())
    (tmp_path / "hellaswag.jsonl").write_text((DATA / "choice.jsonl").read_text())
    metrics = evaluate(engine, evaluator_context, tasks=("hellaswag_local",), include_path=str(tmp_path))
    assert [metric.name.partition("[")[0] for metric in metrics] == [
        "hellaswag_local.acc",
        "hellaswag_local.acc_norm",
    ]


def test_a_group_gets_a_row_of_its_own(tmp_path: Any, engine: Any, evaluator_context: Any) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text((DATA / "choice.yaml").read_text().replace("tiny_choice", name))
    (tmp_path / "choice.jsonl").write_text((DATA / "choice.jsonl").read_text())
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [one, two]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    metrics = evaluate(engine, evaluator_context, tasks=("both",), include_path=str(tmp_path), limit=2)
    names = {metric.name.partition("[")[0] for metric in metrics}
    assert {"both.acc", "one.acc", "two.acc_norm"} <= names
