"""Prompts that a model writes itself: asked to continue a chat where its user would speak, it speaks as a user would.

The idea is Magpie's (Xu et al. 2024, arXiv:2406.08464). What comes out is spread as what the model was tuned on:
writing, code, extraction, roles to play, which corpora of questions or prose lack.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infermix.errors import UserError
from infermix.roles.engine import Tokenizer
from infermix.roles.request import SamplingParams
from infermix.workload.training_prompts import Prompt, plain

#: Turns are drawn from what the model says as it is: a greedy one would be the same every time.
TEMPERATURE = 1.0
#: Why a turn does not become a prompt.
REASONS = ("unended", "empty", "excluded", "duplicate", "too_long")
#: Stands for what a user says. Letters alone, so that templates which trim or escape leave it as it is.
_WORDS = "wordsOfTheUser"


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that also tells the text of a chat, and which tokens no text contains."""

    special_token_ids: tuple[int, ...]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What a chat template puts around the words of a user.

    The ids `before` come in front of them. They end with the special token `end_id`, or, where that is `None`, with
    the text `end_text`. `num_tokens` has a prompt beside the words.
    """

    before: tuple[int, ...]
    end_id: int | None
    end_text: str
    num_tokens: int


def user_turn(tokenizer: ChatTokenizer) -> UserTurn:
    """Raises `UserError` without a chat template, and for one that cannot be split around a user's words."""
    text = tokenizer.render_chat([{"role": "user", "content": _WORDS}])
    before, _, behind = text.partition(_WORDS)
    if text.count(_WORDS) != 1:
        raise _unsplit(f"it writes what a user says {text.count(_WORDS)} times")
    # Most vocabularies begin a word with its space: after a lone space, words would be other tokens than they are.
    ids = tuple(tokenizer.encode(before.rstrip(" ")))
    if not ids:
        raise _unsplit("it writes nothing in front of what a user says, so there is nothing to continue")
    end_id, end_text = _end(tokenizer, behind)
    return UserTurn(ids, end_id, end_text, len(ids) + len(tokenizer.encode(behind)))


def _end(tokenizer: ChatTokenizer, behind: str) -> tuple[int | None, str]:
    """The special token behind the words, or the first line of text where that comes earlier."""
    ids = tokenizer.encode(behind)
    at = next((at for at, token_id in enumerate(ids) if token_id in tokenizer.special_token_ids), None)
    lines = tokenizer.decode(ids[:at]).split("\n")
    text = next((line.strip() for line in lines if line.strip()), "")
    if at is None and not text:
        raise _unsplit("it writes nothing behind what a user says, so nothing tells where that ends")
    return (None, text) if text else (ids[at or 0], "")


def _unsplit(why: str) -> UserError:
    return UserError(
        f"the model's chat template cannot be split around the words of a user: {why}",
        where="--self-prompts", hint="give a --corpus instead",
    )  # fmt: skip


def turn_sampling(turn: UserTurn, count: int, *, max_tokens: int, seed: int) -> list[SamplingParams]:
    """How each of `count` turns is drawn, so that whole prompts have `max_tokens` at most.

    The seeds depend on `seed` and the number of the turn alone, and have nothing in common with those of another
    `seed`, or with seeds that count from `seed` (those of answers). Raises `UserError` when there is no room.
    """
    room = max_tokens - turn.num_tokens
    if room < 1:
        told = f"{max_tokens} tokens are no more than the {turn.num_tokens} that the chat template writes by itself"
        raise UserError(told, where="--prompt-tokens", hint="raise it")
    first = random.Random(f"self-prompts {seed}").getrandbits(48)
    stops = (turn.end_id,) if turn.end_id is not None else ()
    texts = (turn.end_text,) if turn.end_id is None else ()
    # One more for the token that ends the turn.
    return [
        SamplingParams(
            max_new_tokens=room + 1, temperature=TEMPERATURE, seed=first + index, stop_token_ids=stops, stop=texts
        )
        for index in range(count)
    ]


def choose_prompts(
    turn: UserTurn, drawn: Iterable[Sequence[int]], tokenizer: ChatTokenizer, *, max_tokens: int,
    excluded: Collection[str] = (), taken: Iterable[Prompt] = (),
) -> tuple[list[Prompt], Counter[str]]:  # fmt: skip
    """The turns as prompts of `max_tokens` at most, and how many were dropped, by reason (`REASONS`).

    `excluded` are texts as `plain` writes them; a prompt that is one of `taken` is a duplicate.
    """
    known, said, dropped = set(taken), set[str](), Counter(dict.fromkeys(REASONS, 0))
    prompts: list[Prompt] = []
    for ids in drawn:
        words = _words(turn, ids, tokenizer)
        text = plain(words or "")
        prompt = tuple(tokenizer.apply_chat([{"role": "user", "content": words}])) if words else ()
        reason = _reason(words, text in excluded, text in said or prompt in known, len(prompt) > max_tokens)
        if reason is None:
            said.add(text)
            prompts.append(prompt)
        else:
            dropped[reason] += 1
    return prompts, dropped


def _reason(words: str | None, is_excluded: bool, is_known: bool, is_long: bool) -> str | None:
    if words is None:
        return "unended"
    if not words:
        return "empty"
    if is_excluded:
        return "excluded"
    if is_known:
        return "duplicate"
    return "too_long" if is_long else None  # the words may be more tokens than were drawn


def _words(turn: UserTurn, ids: Sequence[int], tokenizer: ChatTokenizer) -> str | None:
    """`None` for a turn that does not end as the template ends one: cut off, or another special token came first."""
    if turn.end_id is not None:
        *inner, last = ids
        ended, text = last == turn.end_id, tokenizer.decode(inner)
    else:
        inner = list(ids)
        text, found, _ = tokenizer.decode(inner).partition(turn.end_text)
        ended = bool(found)
    return text.strip() if ended and not set(inner) & set(tokenizer.special_token_ids) else None
