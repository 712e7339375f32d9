"""Prompts that a model writes itself: where its template splits, what is dropped, and from draws to heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.cli import BAD_INPUT, main
from infermix.engine.self_output import completions
from infermix.engine.tokenizer import HfTokenizer
from infermix.errors import UserError
from infermix.workload.self_prompts import UserTurn, choose_prompts, turn_sampling, user_turn

Build = Callable[..., Any]
#: The words of a vocabulary of 96; the first six are special, `</s>` (5) is what the tiny model ends with.
WORDS = (
    "<pad>",
    "<s>",
    "<user>",
    "<end>",
    "<bot>",
    "</s>",
    "SAYS",
    "REPLY",
    *(f"w{at}" for at in range(8, 96)),
)
CHAT = "<s> <user> {{ messages[0]['content'] }} <end>{% if add_generation_prompt %} <bot>{% endif %}"
TEXT = "<s> SAYS {{ messages[0]['content'] }} \n REPLY"


def backend(template: str | None) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=["<user>", "<end>", "<bot>"], **special
    )
    made.chat_template = template
    return made


def tokenizer(template: str | None = CHAT) -> HfTokenizer:
    return HfTokenizer(backend(template), "tiny")


def test_a_special_token_ends_the_words() -> None:
    assert user_turn(tokenizer()) == UserTurn((1, 2), 3, "", 4)


def test_text_ends_the_words_where_no_special_token_does() -> None:
    assert user_turn(tokenizer(TEXT)) == UserTurn((1, 6), None, "REPLY", 3)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("<s> <user> hello <end>", "it writes what a user says 0 times"),
        ("<s> {{ messages[0]['content'] }} {{ messages[0]['content'] }} <end>", "it writes what a user says 2 times"),
        ("{{ messages[0]['content'] }} <end>", "nothing in front"),
        ("<s> <user> {{ messages[0]['content'] }} \n", "nothing behind"),
        (None, "tiny has no chat template"),
    ],
)
def test_a_template_that_cannot_be_split(template: str | None, why: str) -> None:
    with pytest.raises(UserError, match=why):
        user_turn(tokenizer(template))


@pytest.mark.parametrize(
    ("drawn", "reason"),
    [
        ((8, 9), "unended"),
        ((8, 5), "unended"),  # the model's end, not the template's
        ((8, 4, 9, 3), "unended"),  # another special token came first
        ((3,), "empty"),
        ((10, 11, 3), "excluded"),
        ((8, 9, 3), "duplicate"),
        ((12, 3), "duplicate"),  # of the corpus
        ((8, 8, 8, 3), "too_long"),
    ],
)
def test_what_is_dropped_is_counted(drawn: tuple[int, ...], reason: str) -> None:
    chats = tokenizer()
    given: dict[str, Any] = {"max_tokens": 6, "excluded": {"w10 w11"}, "taken": [(1, 2, 12, 3, 4)]}
    prompts, dropped = choose_prompts(user_turn(chats), [(8, 9, 3), drawn], chats, **given)
    assert prompts == [(1, 2, 8, 9, 3, 4)]
    assert {name: count for name, count in dropped.items() if count} == {reason: 1}


def test_words_in_front_of_a_text_that_ends_them() -> None:
    chats = tokenizer(TEXT)
    prompts, dropped = choose_prompts(user_turn(chats), [(8, 9, 7), (8, 9, 10)], chats, max_tokens=9)
    assert prompts == [(1, 6, 8, 9, 7)]
    assert dropped["unended"] == 1


def test_seeds_of_turns_differ_and_those_of_another_seed_too() -> None:
    turn = user_turn(tokenizer())
    first, second = (turn_sampling(turn, 50, max_tokens=9, seed=seed) for seed in (0, 1))
    assert len({each.seed for each in (*first, *second)} - set(range(51))) == 100
    assert first == turn_sampling(turn, 60, max_tokens=9, seed=0)[:50]
    assert {(each.temperature, each.max_new_tokens, each.stop_token_ids) for each in first} == {(1.0, 6, (3,))}


def test_a_template_that_leaves_no_room() -> None:
    with pytest.raises(UserError, match="4 tokens are no more than the 4 that the chat template writes"):
        turn_sampling(user_turn(tokenizer()), 1, max_tokens=4, seed=0)


def test_the_same_seed_draws_the_same_prompts_in_any_company(build_engine: Build) -> None:
    turn = user_turn(tokenizer())

    def drawn(count: int, seed: int, **given: Any) -> Sequence[tuple[int, tuple[int, ...]]]:
        sampling = turn_sampling(turn, count, max_tokens=12, seed=seed)
        return sorted(completions(build_engine(**given), [turn.before] * count, sampling))

    assert drawn(8, 0) == drawn(8, 0, max_num_seqs=3)
    assert drawn(8, 0)[:4] == drawn(4, 0)
    assert drawn(8, 0) != drawn(8, 1)
    assert len({ids for _, ids in drawn(8, 0)}) > 4


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that says a few words and then mostly `<end>`, with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("talker")
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=5, bos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # the first channel, the same everywhere, is a bias: towards <end>, away from others
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:8, 0] = -2.0
        model.lm_head.weight[3:6, 0] = torch.tensor([0.5, -2.0, -0.2])
    model.save_pretrained(folder)
    backend(CHAT).save_pretrained(folder)
    return folder


def train(model: Path, output: Path, *more: str) -> int:
    small = ["--new-tokens", "16", "--steps", "1", "--batch-tokens", "64", "--prompt-tokens", "64", "--device", "cpu"]
    return main(["train-heads", str(model), "--method", "medusa", "--output", str(output), *small, *more])


def about(output: Path) -> Mapping[str, Any]:
    return json.loads((output / "config.json").read_text())


def test_from_draws_to_heads(talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"prompt": f"w{n} w{n + 1}"}) + "\n" for n in range(20, 24)))
    texts = tmp_path / "t.jsonl"
    given = ["--self-prompts", "24", "--corpus", str(tmp_path / "c.jsonl"), "--texts", str(texts)]
    assert train(talker, tmp_path / "a", *given) == 0
    figures = json.loads(capsys.readouterr().out)
    told = figures["self_prompts"]
    assert told["asked"] == 24 == told["used"] + sum(told["dropped"].values())
    assert told["used"] > 2
    assert told["dropped"]["unended"] > 0
    assert told["temperature"] == 1.0
    assert 0 < figures["prompts_from"]["self"] <= told["used"]
    assert 0 < figures["prompts_from"]["corpus"] <= 4
    assert about(tmp_path / "a")["self_prompts"] == told
    assert about(tmp_path / "a")["prompts_from"] == figures["prompts_from"]
    made = texts.read_text()
    assert json.loads(made.partition("\n")[0])["counts"] == {"self_prompts": told}
    assert train(talker, tmp_path / "b", *given) == 0  # out of the file
    assert about(tmp_path / "b")["self_prompts"] == told
    texts.unlink()
    assert train(talker, tmp_path / "b", *given) == 0
    assert texts.read_text() == made


def test_without_a_corpus(talker: Path, tmp_path: Path) -> None:
    assert train(talker, tmp_path / "a", "--self-prompts", "24") == 0
    assert about(tmp_path / "a")["prompts_from"]["corpus"] == 0


def test_a_time_limit_cuts_prompts_short(talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(talker, tmp_path / "a", "--self-prompts", "9", "--time-limit-s", "0.001") == BAD_INPUT
    told = capsys.readouterr().err
    assert "'out_of_time': 9" in told
    assert "--time-limit-s 0.001: the model was ready after" in told


def test_no_prompts_at_all(talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(talker, tmp_path / "a") == BAD_INPUT
    assert "give files, --self-prompts N, or both" in capsys.readouterr().err


def test_a_model_without_a_template(talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mute = shutil.copytree(talker, tmp_path / "mute")
    backend(None).save_pretrained(mute)
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    assert train(mute, tmp_path / "a", "--self-prompts", "2") == BAD_INPUT
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-3", "many", "1.5"])
def test_a_number_that_is_none(talker: Path, tmp_path: Path, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train(talker, tmp_path, f"--self-prompts={number}")
    assert f"argument --self-prompts: '{number}' is no whole number above 0" in capsys.readouterr().err


def test_excluded_prompts_stay_excluded(talker: Path, tmp_path: Path) -> None:
    texts, excluded = tmp_path / "t.jsonl", tmp_path / "e.jsonl"
    given = ["--self-prompts", "24", "--texts", str(texts)]
    assert train(talker, tmp_path / "a", *given) == 0
    line = json.loads(texts.read_text().splitlines()[1])
    words = tokenizer().decode(line["ids"][2 : line["prompt"] - 2])
    excluded.write_text(json.dumps({"question": words.upper()}) + "\n")
    texts.unlink()
    assert train(talker, tmp_path / "b", *given, "--exclude", str(excluded)) == 0
    before, after = (about(tmp_path / name)["self_prompts"] for name in "ab")
    assert after["dropped"]["excluded"] >= 1
    assert after["used"] == before["used"] - 1
