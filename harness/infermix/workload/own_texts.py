"""Texts of a model's own in a JSONL file, so that they are made once and train several methods."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infermix.errors import UserError
from infermix.roles.training import OwnOutput

#: Of prompts.
ORIGINS = ("corpus", "self")


def write_texts(
    path: Path, texts: Sequence[OwnOutput], about: Mapping[str, Any], counts: Mapping[str, Any] | None = None
) -> None:
    """`about` and `counts` in the first line, a text in each other one; the file is there whole or not at all."""
    lines = [{"about": dict(about), "counts": dict(counts or {})}, *map(_line, texts)]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(partial, path)


def _line(text: OwnOutput) -> dict[str, Any]:
    return {"prompt": text.num_prompt_tokens, "origin": text.origin, "ids": text.token_ids}


def read_texts(path: Path, about: Mapping[str, Any], vocab_size: int) -> tuple[list[OwnOutput], dict[str, Any]]:
    """The texts and the counts. A text that does not tell its origin comes from a corpus.

    Raises `UserError` for a broken file, ids beyond the vocabulary, and when the file was made `about` another.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    if not lines:
        raise UserError("is empty", where=str(path), hint="remove it, and it is written")
    first, *rest = lines
    found = first.get("about") if isinstance(first, dict) else None
    if found != dict(about):
        hint = "name another file, which is then written, or give what this one was made with"
        raise UserError(f"was made with {found}, not with {dict(about)}", where=str(path), hint=hint)
    counts = first.get("counts", {})
    if not isinstance(counts, dict):
        raise UserError(f"counts is {counts!r}, expected an object", where=f"{path}:1")
    return [_text(line, f"{path}:{number}", vocab_size) for number, line in enumerate(rest, 2)], counts


def _text(line: Any, where: str, vocab_size: int) -> OwnOutput:
    ids, prompt = (line.get("ids"), line.get("prompt")) if isinstance(line, dict) else (None, None)
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < vocab_size for each in ids):
        raise UserError(f"ids: expected a list of token ids below {vocab_size}", where=where)
    if type(prompt) is not int or not 0 < prompt <= len(ids):
        raise UserError(f"prompt is {prompt!r}, expected how many of the {len(ids)} ids are one", where=where)
    origin = line.get("origin", ORIGINS[0])
    if origin not in ORIGINS:
        raise UserError(f"origin is {origin!r}, expected {' or '.join(ORIGINS)}", where=where)
    return OwnOutput(tuple(ids), prompt, origin)
