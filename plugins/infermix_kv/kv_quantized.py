"""KV layout `quantized`: blocks of int8 or fp8 numbers, with a scale for every token and head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.toolkit.paged_space import PagedSpace, paged_shape

if TYPE_CHECKING:
    from infermix_kv.quantized_store import QuantizedStore

#: Bytes of the two scales, of a key and of a value.
_SCALE_BYTES = 8


class QuantizedLayout:
    """`dtype` is `int8` or `fp8` (float8_e4m3fn)."""

    def __init__(self, dtype: str, block_size: int) -> None:
        self._dtype, self._block_size = dtype, block_size

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens."""
        return paged_shape(groups, budget, block_size=self._block_size, per_token=sum(map(_bytes_per_token, groups)))

    def space(self, shape: KVShape) -> PagedSpace:
        return PagedSpace(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> QuantizedStore:
        import torch

        from infermix_kv.quantized_store import QuantizedStore

        stored = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[self._dtype]
        return QuantizedStore(shape, device, dtype, stored)


def _bytes_per_token(group: KVGroup) -> float:
    return group.bytes_per_token(1) + len(group.layers) * group.num_kv_heads * _SCALE_BYTES
