"""Prompts to train on: JSONL files of questions or chats, and plain text in windows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infermix.errors import UserError
from infermix.roles.engine import Tokenizer
from infermix.toolkit.corpus import PYDOC_TOPICS, read_corpus
from infermix.workload.prompts import Line, read_lines

#: Keys that are looked for, in this order.
FIELDS = ("prompt", "text", "messages", "turns", "question", "goal", "query")

Prompt = tuple[int, ...]


def training_prompts(
    corpora: Sequence[str], tokenizer: Tokenizer, *, exclude: Sequence[str], max_tokens: int, base: Path, seed: int
) -> list[Prompt]:
    """The prompts of all files, shuffled; longer ones than `max_tokens` are left out, text is cut into windows of it.

    Lines of a JSONL file become chats where the tokenizer has a template. Lines with a text that a file of `exclude`
    holds are left out, so that nothing is measured on what was trained on. Raises `UserError` for files that cannot
    be read, lines without a prompt, and when nothing is left.
    """
    excluded = excluded_texts(exclude, base)
    prompts = [prompt for name in corpora for prompt in _read(name, tokenizer, excluded, max_tokens, base)]
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= max_tokens]
    if not fitting:
        hint = f"{len(prompts)} prompts are longer than {max_tokens} tokens" if prompts else None
        raise UserError("there are no prompts to train on", where=", ".join(corpora), hint=hint)
    random.Random(seed).shuffle(fitting)
    return fitting


def excluded_texts(exclude: Sequence[str], base: Path) -> set[str]:
    """All texts of the files, as `plain` writes them. Raises `UserError` for a file or line that cannot be read."""
    return {plain(text) for name in exclude for line in read_lines(base / name) for text in _texts(line)}


def plain(text: str) -> str:
    """The text without what makes no difference: case, and how words are spaced."""
    return " ".join(text.split()).lower()


def _read(name: str, tokenizer: Tokenizer, excluded: set[str], max_tokens: int, base: Path) -> Iterator[Prompt]:
    if name == PYDOC_TOPICS or not name.endswith(".jsonl"):
        ids = tokenizer.encode(read_corpus(name, base).text)
        yield from (tuple(ids[start : start + max_tokens]) for start in range(0, len(ids), max_tokens))
        return
    for line in read_lines(base / name):
        if not any(plain(text) in excluded for text in _texts(line)):
            yield _ids(line, tokenizer)


def _value(line: Line) -> Any:
    found = next((line.data[name] for name in FIELDS if line.data.get(name)), None)
    if found is None:
        raise UserError(f"no prompt: the line has none of {', '.join(FIELDS)}", where=line.where)
    return found


def _messages(line: Line) -> list[Mapping[str, str]]:
    value = _value(line)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and isinstance(value[0], str):
        return [{"role": "user", "content": value[0]}]
    good = isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in value
    )
    if not good:
        raise UserError("the prompt is no text, list of turns or list of messages", where=line.where)
    return value


def _texts(line: Line) -> list[str]:
    return [message["content"] for message in _messages(line)]


def _ids(line: Line, tokenizer: Tokenizer) -> Prompt:
    messages = _messages(line)
    try:
        return tuple(tokenizer.apply_chat(messages))
    except UserError:  # a model without a chat template reads the text as it is
        return tuple(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
