"""The longest repeated suffix against its plain meaning."""

from __future__ import annotations

import random

import pytest
from infermix_decoders.suffix_automaton import SuffixAutomaton


def longest_repeated_suffix(text: list[int]) -> int:
    """Length of the longest suffix that also ends earlier, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[end - length : end] == suffix for end in range(length, len(text))):
            return length
    return 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_longest_repeated_suffix(alphabet: int, seed: int) -> None:
    rng = random.Random(seed)
    automaton, text = SuffixAutomaton(), []
    for _ in range(60):
        text.append(rng.randrange(alphabet))
        automaton.append(text[-1])
        length = automaton.match_length
        assert length == longest_repeated_suffix(text)
        if length:
            end = automaton.match_end
            assert end < len(text)
            assert text[end - length : end] == text[-length:]


def test_the_latest_occurrence_is_proposed() -> None:
    automaton = SuffixAutomaton([1, 2, 7, 1, 2, 8, 1, 2])
    assert (automaton.match_length, automaton.match_end) == (2, 5)


def test_states_stay_below_twice_the_length() -> None:
    rng = random.Random(0)
    automaton = SuffixAutomaton(rng.randrange(4) for _ in range(2000))
    assert len(automaton._length) <= 2 * automaton.size
