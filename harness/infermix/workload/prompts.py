"""Prompts from a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from infermix.errors import UserError, nearest
from infermix.roles.engine import Tokenizer
from infermix.roles.workload import WorkloadContext
from infermix.workload.assemble import ListSource, Prompt
from infermix.workload.components import PromptsOptions

#: Keys that are looked for, in this order, when `field` is not given.
FIELDS = ("prompt", "text", "messages", "turns")


@dataclass(frozen=True, slots=True)
class Line:
    """One object of the file; `where` is `path:line:column`."""

    where: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt before it is tokenized: plain text, or the messages of a chat. `hint`: how to do without a chat."""

    where: str
    category: str
    text: str = ""
    messages: Sequence[Mapping[str, str]] = ()
    hint: str = ""


def read_prompts(options: PromptsOptions, context: WorkloadContext) -> ListSource:
    """Read, order and tokenize. Only the prompts that a repeat needs are tokenized, all of them with `vary`.

    Raises `UserError` as `read_entries` does, and for a prompt that is empty to the tokenizer or does not fit the
    model.
    """
    tokenizer = require_tokenizer(context.tokenizer, "prompts")
    entries, wanted = read_entries(options, context.base)
    prompts = [_prompt(entry, options, tokenizer, context.max_model_len) for entry in entries]
    return ListSource(prompts, wanted)


def read_entries(options: PromptsOptions, base: Path) -> tuple[list[Entry], int]:
    """The prompts of all repeats in their order, and how many of them one repeat sends.

    Raises `UserError`, naming file and line, for a file or field that is missing, a line that is no JSON object, an
    empty prompt, text that is no Unicode, and too few prompts.
    """
    path = base / options.path
    lines = read_lines(path)
    if options.order == "round_robin":
        lines = round_robin(lines, lambda line: _category(line, options))
    wanted = options.num_requests or len(lines)
    check_enough(len(lines), wanted, options.repeat_prompts, str(path))
    return [_entry(line, options) for line in (lines if options.vary else lines[:wanted])], wanted


def require_tokenizer(tokenizer: Tokenizer | None, workload: str) -> Tokenizer:
    if tokenizer is None:
        raise UserError(
            f"the workload {workload!r} needs a tokenizer, and this model has none (dummy weights never do)",
            key="workload",
            hint="use: synthetic",
        )
    return tokenizer


def check_enough(found: int, wanted: int, repeat_prompts: bool, where: str) -> None:
    if found == 0:
        raise UserError("there are no prompts", where=where)
    if found < wanted and not repeat_prompts:
        raise UserError(
            f"{wanted} prompts are asked for, but there are {found}",
            where=where,
            key="workload.num_requests",
            hint="lower num_requests, or set repeat_prompts: true to use prompts again",
        )


def read_lines(path: Path) -> list[Line]:
    """The objects of a JSONL file; blank lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError("there is no such file", where=str(path), key="workload.path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: {error}", where=str(path), key="workload.path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), key="workload.path") from None
    numbered = enumerate(text.split("\n"), start=1)
    return [_line(text, f"{path}:{number}") for number, text in numbered if text.strip()]


def _line(text: str, where: str) -> Line:
    start = f"{where}:{len(text) - len(text.lstrip()) + 1}"
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=f"{where}:{error.colno}") from None
    except (RecursionError, ValueError):  # nests too deeply, or a number of thousands of digits
        raise UserError("not JSON that can be read", where=start) from None
    if not isinstance(data, dict):
        raise UserError(f"expected a JSON object, got {type(data).__name__}", where=start)
    return Line(start, data)


def round_robin(lines: Iterable[Line], category: Callable[[Line], str]) -> list[Line]:
    """The first of each category in turn, then the second, ...; categories in order of appearance."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(category(line), []).append(line)
    return [line for line in chain.from_iterable(zip_longest(*groups.values())) if line is not None]


def _category(line: Line, options: PromptsOptions) -> str:
    if options.order == "round_robin" and options.category_field not in line.data:
        raise _no_field(options.category_field, line)
    return str(line.data.get(options.category_field, ""))


def _no_field(name: str, line: Line) -> UserError:
    return UserError(
        f"no field {name!r}; the line has {', '.join(line.data) or 'none'}",
        where=line.where,
        hint=nearest(name, line.data),
    )


def _prompt(entry: Entry, options: PromptsOptions, tokenizer: Tokenizer, max_model_len: int) -> Prompt:
    if entry.messages:
        token_ids = _apply_chat(entry, tokenizer)
    else:
        token_ids = (*_bos(options, tokenizer), *tokenizer.encode(entry.text))
    if not token_ids:
        raise UserError("the prompt is empty", where=entry.where)
    check_fits(len(token_ids), options.max_new_tokens, max_model_len, entry.where)
    return Prompt(token_ids, options.max_new_tokens, entry.category)


def check_fits(prompt_tokens: int, max_new_tokens: int, max_model_len: int, where: str | None) -> None:
    if prompt_tokens + max_new_tokens > max_model_len:
        raise UserError(
            f"the prompt has {prompt_tokens} tokens, with {max_new_tokens} new ones "
            f"{prompt_tokens + max_new_tokens}, but a sequence of this model may have {max_model_len}",
            where=where,
            key=None if where else "workload.input_tokens",
            hint="shorten the prompt or lower max_new_tokens",
        )


def _entry(line: Line, options: PromptsOptions) -> Entry:
    name = options.field or next((each for each in FIELDS if each in line.data), None)
    if name is None:
        raise _no_field(" or ".join(FIELDS), line)
    if name not in line.data:
        raise _no_field(name, line)
    value = line.data[name]
    if isinstance(value, str):
        return _text_entry(value, options.chat is True, line, options)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return _text_entry(value[0], options.chat is not False, line, options)
    if isinstance(value, list) and value:
        return _chat_entry(value, name, line, options)
    message = f"field {name!r} must be a text, a list of turns or a list of messages, and not empty"
    raise UserError(message, where=line.where)


def _text_entry(text: str, as_chat: bool, line: Line, options: PromptsOptions) -> Entry:
    _check_texts([text], line)
    category = _category(line, options)
    if as_chat:
        messages = [{"role": "user", "content": text}]
        return Entry(line.where, category, messages=messages, hint="chat: false sends the text as it is")
    return Entry(line.where, category, text)


def _chat_entry(messages: Sequence[Any], name: str, line: Line, options: PromptsOptions) -> Entry:
    if options.chat is False:
        raise UserError(f"field {name!r} has chat messages, but chat is false", where=line.where, hint="chat: auto")
    for index, message in enumerate(messages):
        if not _is_message(message):
            key = f"{name}[{index}]"
            raise UserError("a message needs the texts 'role' and 'content'", where=line.where, key=key)
    _check_texts([message["content"] for message in messages], line)
    hint = "give plain text prompts instead of messages"
    return Entry(line.where, _category(line, options), messages=messages, hint=hint)


def _check_texts(texts: Sequence[str], line: Line) -> None:
    if not any(text.strip() for text in texts):
        raise UserError("the prompt is empty", where=line.where)
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            message = f"the prompt holds half a character, the lone surrogate {code} (character {error.start + 1})"
            raise UserError(message, where=line.where, hint="write both halves of the pair or none") from None


def _bos(options: PromptsOptions, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not options.bos:
        return ()
    if tokenizer.bos_token_id is None:
        raise UserError("the tokenizer has no BOS token", key="workload.bos", hint="bos: false")
    return (tokenizer.bos_token_id,)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _apply_chat(entry: Entry, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the template refuses (or that there is none) is told with the line."""
    try:
        return tuple(tokenizer.apply_chat(entry.messages))
    except UserError as error:
        raise UserError(error.message, where=entry.where, hint=entry.hint) from None
