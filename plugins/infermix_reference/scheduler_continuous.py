"""Continuous batching: requests join and leave at every step."""

from __future__ import annotations

from infermix.toolkit.iteration import IterationScheduler


class ContinuousScheduler(IterationScheduler):
    """Requests in order of arrival; the one admitted last is preempted first."""

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, chunked: bool = False, *, swap: bool = False
    ) -> None:
        super().__init__(max_num_seqs, max_num_batched_tokens, chunked, swap=swap)
