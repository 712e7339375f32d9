"""Memory of a GPU that two processes see: CUDA's inter-process handles, the way torch shares tensors."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor


class DeviceBlock(msgspec.Struct, frozen=True, kw_only=True):
    """`size` bytes that another process put on a device, and how to get at them.

    `memory` is the handle of the allocation they lie in, at `memory_offset`; `counter` tells their owner when nobody
    uses them any more, and `event` when they are written.
    """

    size: int
    device: int
    memory: bytes
    storage_bytes: int
    memory_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    wait: bool


def share(data: Tensor) -> DeviceBlock:
    """`data [n]` uint8 on a GPU, whole storages only. It stays until the other side has let go of it.

    Raises `RuntimeError` where the driver or the allocator does not share memory.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    _, parts = reduce_tensor(data)
    device, memory, storage_bytes, memory_offset = parts[6:10]
    counter, counter_offset, event, wait = parts[11:15]
    return DeviceBlock(
        size=data.numel(), device=device, memory=memory, storage_bytes=storage_bytes, memory_offset=memory_offset,
        counter=counter, counter_offset=counter_offset, event=event, wait=wait,
    )  # fmt: skip


def opened(block: DeviceBlock) -> Tensor:
    """The bytes `[n]` uint8, readable behind whatever wrote them. Raises `RuntimeError` as `share` does."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    data: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor, torch.Size((block.size,)), (1,), 0, torch.storage.TypedStorage, torch.uint8, block.device,
        block.memory, block.storage_bytes, block.memory_offset, False, block.counter, block.counter_offset,
        block.event, block.wait,
    )  # fmt: skip
    return data
