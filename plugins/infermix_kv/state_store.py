"""KV layout `state`, second half: block pools of attention layers and slot pools of recurrent ones."""

from __future__ import annotations

import torch
from infermix.errors import OutOfMemory
from infermix.roles.facts import StateTensor
from infermix.roles.kv_space import KVShape
from infermix.toolkit.pool_store import PagedStore
from torch import Tensor


class StateStore(PagedStore):
    """`states[layer][name] [slots, ...]`, the last ones a sink sequence; who runs the layers reads and writes."""

    def __init__(self, shape: KVShape, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__(shape, device, dtype)
        self.states: dict[int, dict[str, Tensor]] = {
            state.layer: {each.name: self._slots_of(each, device, dtype) for each in state.tensors}
            for state in shape.states
        }

    def _slots_of(self, tensor: StateTensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        own = getattr(torch, tensor.dtype) if tensor.dtype else dtype
        num_slots = self.shape.num_state_slots + self.shape.state_slots_per_seq
        try:
            return torch.zeros(num_slots, *tensor.shape, device=device, dtype=own)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise OutOfMemory(f"no memory for {self.shape.bytes} bytes of KV on {device}: {error}") from error

    def allocated_bytes(self) -> int:
        pools = [pool for kept in self.states.values() for pool in kept.values()]
        return super().allocated_bytes() + sum(pool.numel() * pool.element_size() for pool in pools)
