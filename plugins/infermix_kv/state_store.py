"""KV layout `state`, second half: block pools of attention layers and slot pools of recurrent ones."""

from __future__ import annotations

import torch
from infermix.errors import OutOfMemory
from infermix.roles.facts import StateTensor
from infermix.roles.kv_space import KVShape
from infermix.toolkit.pool_store import BlockStore, PagedStore
from torch import Tensor


class StateStore(PagedStore):
    """`states[layer][name] [slots, ...]`, the last ones a sink sequence; who runs the layers reads and writes."""

    def __init__(self, shape: KVShape, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__(shape, device, dtype)
        self.states: dict[int, dict[str, Tensor]] = {
            state.layer: {each.name: self._slots_of(each, device, dtype) for each in state.tensors}
            for state in shape.states
        }
        per_seq = shape.state_slots_per_seq
        self._rows = BlockStore(
            {
                layer: tuple(pool.unflatten(0, (-1, per_seq)) for pool in kept.values())
                for layer, kept in self.states.items()
            }
        )

    def _slots_of(self, tensor: StateTensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        own = getattr(torch, tensor.dtype) if tensor.dtype else dtype
        num_slots = self.shape.num_state_slots + self.shape.state_slots_per_seq
        try:
            return torch.zeros(num_slots, *tensor.shape, device=device, dtype=own)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise OutOfMemory(f"no memory for {self.shape.bytes} bytes of KV on {device}: {error}") from error

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        first = self.shape.num_blocks + 1
        super().copy([pair for pair in pairs if pair[0] < first])
        self._rows.copy([(source - first, target - first) for source, target in pairs if source >= first])

    def block_tensors(self, table: int = 0) -> list[Tensor]:
        """Table 0: blocks of the attention layers; table 1: rows of states, one for each sequence."""
        if table == 0:
            return super().block_tensors(table)
        return [part for parts in self._rows.parts.values() for part in parts]

    def allocated_bytes(self) -> int:
        return super().allocated_bytes() + self._rows.allocated_bytes()
