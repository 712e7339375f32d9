"""How many tokens to draft: fixed, or the length that the measured acceptance makes worthwhile."""

from __future__ import annotations


def expected_tokens(acceptance: float, count: int) -> float:
    """Tokens per round when every draft stays with the same probability (Leviathan et al., 2023, eq. 1)."""
    if acceptance >= 1:
        return count + 1.0
    return (1 - acceptance ** (count + 1)) / (1 - acceptance)


class DraftLength:
    """The draft length of the next round.

    Adaptive: maximises expected tokens over the cost `count * cost_ratio + 1`, with the acceptance as a moving
    average over drafts. `cost_ratio` is what one draft forward costs in target forwards.
    """

    def __init__(self, longest: int, *, adaptive: bool, cost_ratio: float, memory: float = 0.98) -> None:
        self.choices = tuple(range(1, longest + 1)) if adaptive else (longest,)
        self._cost_ratio, self._memory = cost_ratio, memory
        self._acceptance = 0.7
        self.current = longest

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Count one round: every draft up to the first rejected one was tried."""
        if len(self.choices) == 1:
            return
        tried = min(num_accepted + 1, num_drafts)
        for index in range(tried):
            stayed = float(index < num_accepted)
            self._acceptance = self._memory * self._acceptance + (1 - self._memory) * stayed
        if tried:
            self.current = max(self.choices, key=self._worth)

    def _worth(self, count: int) -> float:
        return expected_tokens(self._acceptance, count) / (count * self._cost_ratio + 1)
