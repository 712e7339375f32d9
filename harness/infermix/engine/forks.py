"""A new sequence begins with the KV of a running one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from infermix.errors import Unsupported

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.roles.kv_store import KVStore
    from infermix.roles.request import Request, Sequence


def share_kv(parent: Sequence, child: Sequence, space: KVSpace, store: KVStore, shape: KVShape) -> None:
    """Fork the parent's KV as far as the child's tokens agree with what it has computed, but for the last one.

    The child's last token is computed again for its logits. Nothing is shared while the parent waits, by a layout
    that does not fork, where the space is full, or where a fork would take the last free block: the parent may need
    it at the next step.
    """
    num_shared = _num_shared(parent, child)
    if parent.lane < 0 or not num_shared:
        return
    try:
        pairs = space.fork(parent.seq_id, child.seq_id, num_shared)
    except Unsupported:
        return
    if pairs is None:
        return
    store.copy(pairs)
    usage = space.usage()
    grows = shape.blocks_per_seq > 1
    if grows and usage.capacity_tokens - usage.allocated_tokens < shape.block_size:
        space.release(child.seq_id)
        return
    child.num_computed = num_shared


def _num_shared(parent: Sequence, child: Sequence) -> int:
    """Tokens in common that are known on the host and computed once every launched step has run."""
    longest = min(len(parent.tokens), parent.num_computed, len(child.tokens) - 1)
    return next((i for i in range(longest) if parent.tokens[i] != child.tokens[i]), longest)


def output_seed(seed: int, output: int) -> int:
    """The seed of one output of a request; the first has the request's own. Seeds of 32 bits never meet."""
    return seed + (output << 32)


def requests_of_outputs(request: Request) -> Iterator[Request]:
    """One request for each output behind the first: the same prompt, noise of its own."""
    sampling = request.sampling
    for output in range(1, sampling.num_outputs):
        yield replace(request, sampling=replace(sampling, seed=output_seed(sampling.seed, output)))
