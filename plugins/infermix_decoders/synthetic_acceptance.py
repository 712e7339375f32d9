"""What verification costs, apart from how good drafts are: a stated number of them stays, right or wrong."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from infermix.roles.request import Sequence
from infermix.toolkit.sampling import uniform
from infermix.toolkit.verification import Drafted, VerifyingDecoder

from infermix_decoders.draft_length import expected_tokens

#: Noise stream that decides which drafts stay; 0 to 2 are taken by decoders that mean it.
_STREAM = 3


def acceptance_for(tokens_per_forward: float, num_drafts: int) -> float:
    """The probability of a draft to stay, each behind one that stayed, that gives this mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, num_drafts) < tokens_per_forward:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class LastToken:
    """Drafts that cost nothing: the last token again and again."""

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        return [sequence.tokens[-1]] * limit

    def forget(self, sequence: Sequence) -> None:
        """It keeps nothing."""


class SyntheticDecoder(VerifyingDecoder):
    """Verifies as every drafting decoder does, then keeps drafts by a coin instead of by what they are.

    Its outputs mean nothing: the tokens behind a wrong draft are kept, too. The coin of a draft depends on the
    request's seed and the position alone.
    """

    def __init__(self, tokens_per_forward: float, num_draft_tokens: int, max_model_len: int, **given: Any) -> None:
        super().__init__(LastToken(), num_draft_tokens, max_model_len, **given)
        self._acceptance = acceptance_for(tokens_per_forward, num_draft_tokens)
        self.details = {"acceptance": self._acceptance}

    def _num_accepted(self, row: Drafted, draws: Seq[int]) -> int:
        sequence, count = row.entry.sequence, 0
        seed, first = sequence.request.sampling.seed, len(sequence.tokens)
        while count < row.num_real and uniform(seed, first + count, _STREAM) < self._acceptance:
            count += 1
        return count
