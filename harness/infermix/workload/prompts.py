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
    """One object of the file; `where` is `path:line`."""

    where: str
    data: Mapping[str, Any]


def read_prompts(options: PromptsOptions, context: WorkloadContext) -> ListSource:
    """Read, order and tokenize. Only the prompts that a repeat needs are tokenized, all of them with `vary`.

    Raises `UserError`, naming file and line, for a file or field that is missing, a line that is no JSON object, an
    empty prompt, a prompt that does not fit the model, and too few prompts.
    """
    tokenizer = require_tokenizer(context.tokenizer, "prompts")
    path = context.base / options.path
    lines = read_lines(path)
    if options.order == "round_robin":
        lines = round_robin(lines, lambda line: _category(line, options))
    wanted = options.num_requests or len(lines)
    check_enough(len(lines), wanted, options.repeat_prompts, str(path))
    used = lines if options.vary else lines[:wanted]
    prompts = [_prompt(line, options, tokenizer, context.max_model_len) for line in used]
    return ListSource(prompts, wanted)


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
    return [Line(f"{path}:{number}", _parse(line, f"{path}:{number}")) for number, line in numbered if line.strip()]


def _parse(text: str, where: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=f"{where}:{error.colno}") from None
    if not isinstance(data, dict):
        raise UserError(f"expected a JSON object, got {type(data).__name__}", where=where)
    return data


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


def _prompt(line: Line, options: PromptsOptions, tokenizer: Tokenizer, max_model_len: int) -> Prompt:
    token_ids = _encode(line, options, tokenizer)
    if not token_ids:
        raise UserError("the prompt is empty", where=line.where)
    check_fits(len(token_ids), options.max_new_tokens, max_model_len, line.where)
    return Prompt(token_ids, options.max_new_tokens, _category(line, options))


def check_fits(prompt_tokens: int, max_new_tokens: int, max_model_len: int, where: str | None) -> None:
    if prompt_tokens + max_new_tokens > max_model_len:
        raise UserError(
            f"the prompt has {prompt_tokens} tokens, with {max_new_tokens} new ones "
            f"{prompt_tokens + max_new_tokens}, but a sequence of this model may have {max_model_len}",
            where=where,
            key=None if where else "workload.input_tokens",
            hint="shorten the prompt or lower max_new_tokens",
        )


def _encode(line: Line, options: PromptsOptions, tokenizer: Tokenizer) -> tuple[int, ...]:
    name = options.field or next((each for each in FIELDS if each in line.data), None)
    if name is None:
        raise _no_field(" or ".join(FIELDS), line)
    if name not in line.data:
        raise _no_field(name, line)
    value = line.data[name]
    if isinstance(value, str):
        return _encode_text(value, options.chat is True, line, options, tokenizer)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return _encode_text(value[0], options.chat is not False, line, options, tokenizer)
    if isinstance(value, list) and value:
        return _encode_messages(value, name, line, options, tokenizer)
    message = f"field {name!r} must be a text, a list of turns or a list of messages, and not empty"
    raise UserError(message, where=line.where)


def _encode_text(
    text: str, as_chat: bool, line: Line, options: PromptsOptions, tokenizer: Tokenizer
) -> tuple[int, ...]:
    if not text.strip():
        raise UserError("the prompt is empty", where=line.where)
    if as_chat:
        messages = [{"role": "user", "content": text}]
        return _apply_chat(messages, line, tokenizer, "chat: false sends the text as it is")
    return (*_bos(options, tokenizer), *tokenizer.encode(text))


def _bos(options: PromptsOptions, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not options.bos:
        return ()
    if tokenizer.bos_token_id is None:
        raise UserError("the tokenizer has no BOS token", key="workload.bos", hint="bos: false")
    return (tokenizer.bos_token_id,)


def _encode_messages(
    messages: Sequence[Any], name: str, line: Line, options: PromptsOptions, tokenizer: Tokenizer
) -> tuple[int, ...]:
    if options.chat is False:
        raise UserError(f"field {name!r} has chat messages, but chat is false", where=line.where, hint="chat: auto")
    for index, message in enumerate(messages):
        if not _is_message(message):
            key = f"{name}[{index}]"
            raise UserError("a message needs the texts 'role' and 'content'", where=line.where, key=key)
    if not any(message["content"].strip() for message in messages):
        raise UserError("the prompt is empty", where=line.where)
    return _apply_chat(messages, line, tokenizer, "give plain text prompts instead of messages")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _apply_chat(
    messages: Sequence[Mapping[str, str]], line: Line, tokenizer: Tokenizer, hint: str
) -> tuple[int, ...]:
    """What the template refuses (or that there is none) is told with the line."""
    try:
        return tuple(tokenizer.apply_chat(messages))
    except UserError as error:
        raise UserError(error.message, where=line.where, hint=hint) from None
