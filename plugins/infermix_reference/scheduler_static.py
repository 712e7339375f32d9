"""Static batching: a batch starts together, and the next one begins when all of it has ended."""

from __future__ import annotations

from infermix.toolkit.request_batches import RequestBatchScheduler


class StaticScheduler(RequestBatchScheduler):
    """A batch starts at once with what waits, up to `batch_size` requests."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
