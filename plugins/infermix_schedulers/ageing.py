"""Orders that age: `priority` and `shortest_first`. Both are a key of "time of arrival + handicap"."""

from __future__ import annotations

from collections.abc import Callable

from infermix.roles.request import Sequence
from infermix.toolkit.waiting import Key, KeyedQueue

Length = Callable[[Sequence], int]


def _prompt(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens


def _output(sequence: Sequence) -> int:
    return sequence.request.sampling.max_new_tokens


def _total(sequence: Sequence) -> int:
    return _prompt(sequence) + _output(sequence)


LENGTHS: dict[str, Length] = {"prompt": _prompt, "output": _output, "total": _total}


def priority_queue(ageing_s: float) -> KeyedQueue:
    """The smallest `Request.priority` first; `ageing_s` of waiting make up for one class.

    Bound on overtaking: a request of class c that arrived at a is overtaken by one of class c' only if that arrives
    before a + (c - c') ageing_s. So it waits at most for what arrived until then, however long the overload lasts:

        wait <= (Q + sum over classes c' < c of W(c', (c - c') ageing_s)) / mu + R

    with Q the work that is queued or running ahead of it when it arrives, W(c', t) the work of class c' that arrives
    within t seconds after it, mu the work that is done per second and R the longest time that one request runs. With
    arrivals of rate lambda(c') and mean work s(c'), W(c', t) = lambda(c') s(c') t. Strict priority (ageing_s beyond
    the length of the overload) has no such bound: there W grows with the overload.
    """
    return KeyedQueue(lambda sequence, now_s: now_s + ageing_s * sequence.request.priority)


def shortest_queue(length: str, token_s: float) -> KeyedQueue:
    """The shortest first; `token_s` seconds of waiting make up for one token of length.

    Bound on overtaking: a request of n tokens that arrived at a is overtaken by one of m tokens only if that arrives
    before a + (n - m) token_s. Shortest job first minimises the mean time in the system where lengths are known;
    outputs count with `max_new_tokens`, which is what is known beforehand; `predicted.py` guesses better.
    """
    tokens = LENGTHS[length]
    key: Key = lambda sequence, now_s: now_s + token_s * tokens(sequence)  # noqa: E731
    return KeyedQueue(key)
