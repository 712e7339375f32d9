"""Eager forwards of a few shapes in set-up, so that nothing is compiled or tuned inside a measured window."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from infermix.engine.packing import PackEntry, pack

if TYPE_CHECKING:
    from infermix.engine.bridge import Joint
    from infermix.roles.kv_space import KVShape, KVSpace

#: New tokens of each sequence per forward: one token (which compilers treat apart), decodes, prompts of several
#: lengths, and both mixed.
WARM_STEPS = ((1,), (1, 1), (1, 1, 1), (5,), (23, 1), (64,), (256,))


def warm_up(joint: Joint, space: KVSpace, shape: KVShape) -> int:
    """Run `WARM_STEPS` as far as they fit, on an idle space that is empty again afterwards; returns their number."""
    done = 0
    for lengths in WARM_STEPS:
        done += len(lengths) <= shape.max_num_seqs and _step(joint, space, shape, lengths)
    return done


def _step(joint: Joint, space: KVSpace, shape: KVShape, lengths: tuple[int, ...]) -> bool:
    ids = [-1 - index for index in range(len(lengths))]
    try:
        for seq_id, length in zip(ids, lengths, strict=True):
            longest = min(shape.max_model_len, shape.max_query_len or shape.max_model_len)
            if length > longest or not space.reserve(seq_id, length):
                return False
        entries = [PackEntry(seq_id, [0] * length, 0) for seq_id, length in zip(ids, lengths, strict=True)]
        if space.fixed_rows:
            entries.sort(key=lambda entry: space.block_table(entry.seq_id)[0])
        joint.forward(pack(entries, space, shape, joint.device))
    finally:
        for seq_id in ids:
            space.release(seq_id)
    return True


def num_compiles() -> int:
    """Frames that torch.compile has translated in this process so far; 0 where it was never loaded."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["total"]) if utils is not None else 0
