"""KV layout `latent`: what MLA layers compress a token to, in paged blocks (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.toolkit.paged_space import PagedSpace, bytes_per_token, paged_shape

if TYPE_CHECKING:
    from infermix.toolkit.pool_store import PagedStore


class LatentLayout:
    """One row of `latent + rope` numbers per token and layer, read as one KV head; its value is the row's first part.

    The row of DeepSeek-V3 has 512 + 64 numbers; its expanded keys and values are 40,960.
    """

    form = "latent"

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when `max_bytes` does not hold one sequence of `max_model_len` tokens."""
        per_token = bytes_per_token(groups, budget.element_bytes)
        return paged_shape(groups, budget, block_size=self._block_size, per_token=per_token)

    def space(self, shape: KVShape) -> PagedSpace:
        return PagedSpace(shape)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> PagedStore:
        from infermix.toolkit.pool_store import PagedStore

        return PagedStore(shape, device, dtype)
