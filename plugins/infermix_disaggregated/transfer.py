"""KV between two processes: through shared host memory (pinned on the sending side when it comes from a GPU), or
left on a GPU that both see."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from infermix.errors import Unsupported
from infermix.toolkit.handover import (
    KVParcel,
    ParcelHeader,
    export_parcel,
    gather_parcel,
    import_parcel,
    split_parcel,
)

from infermix_disaggregated.device_memory import opened, share
from infermix_disaggregated.messages import Computed, Parcel

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape, KVSpace

#: How the record names the ways.
HOST, DEVICE = "shared host memory", "device memory of both (CUDA IPC)"


def blocks_of(space: KVSpace, shape: KVShape, seq_id: int) -> list[Sequence[int]]:
    return [list(space.block_table(seq_id, table)) for table in range(shape.num_tables)]


def check_layout(store: Any, shape: KVShape) -> None:
    """Raises `Unsupported` for a layout whose blocks cannot be handed over as they are."""
    if not hasattr(store, "block_tensors"):
        raise Unsupported(f"{type(store).__name__} does not say which tensors its blocks are in, so none can move")
    if shape.table_limits or shape.states:
        raise Unsupported("layouts with rings of blocks or recurrent states are not handed over between workers")


def send(
    store: Any, space: KVSpace, shape: KVShape, layout: str, seq_id: int, num_tokens: int, *, on_device: bool
) -> Parcel:
    """The KV of a sequence where the receiver finds it, and lets go of it."""
    blocks = blocks_of(space, shape, seq_id)
    if on_device:
        parcel = gather_parcel(store, shape, layout, blocks, num_tokens)
        flat = torch.cat([rows.flatten() for rows in parcel.payload])
        return Parcel(device=share(flat), header=msgspec.json.encode(parcel.header))
    data = export_parcel(store, shape, layout, blocks, num_tokens).to_bytes()
    # Untracked: the receiver unlinks it; a tracker of this process would do so a second time.
    memory = SharedMemory(create=True, size=len(data))
    assert memory.buf is not None
    memory.buf[: len(data)] = data
    _untrack(memory)
    memory.close()
    return Parcel(block=memory.name, size=memory.size)


def receive(sent: Parcel) -> KVParcel:
    """Take a parcel, and give the memory back: at once on the host, on a device when the parcel is dropped."""
    if sent.device is not None:
        return split_parcel(msgspec.json.decode(sent.header, type=ParcelHeader), opened(sent.device))
    memory = SharedMemory(name=sent.block)
    assert memory.buf is not None
    try:
        return KVParcel.from_bytes(bytes(memory.buf[: sent.size]))
    finally:
        memory.close()
        memory.unlink()


def discard(reply: Computed) -> None:
    """Give back what nobody will import."""
    if reply.parcel is None:
        return
    if reply.parcel.device is not None:
        opened(reply.parcel.device)
        return
    memory = SharedMemory(name=reply.parcel.block)
    memory.close()
    memory.unlink()


def place(store: Any, space: KVSpace, shape: KVShape, layout: str, parcel: KVParcel, seq_id: int) -> bool:
    """Write a parcel into blocks reserved for a sequence; `False` (and no change) when there is no room."""
    if not space.reserve(seq_id, parcel.header.num_tokens):
        return False
    import_parcel(store, shape, layout, parcel, blocks_of(space, shape, seq_id))
    return True


def _untrack(memory: SharedMemory) -> None:
    """The receiver unlinks it; the tracker of this process would do so a second time."""
    from multiprocessing import resource_tracker

    resource_tracker.unregister(f"/{memory.name.lstrip('/')}", "shared_memory")
