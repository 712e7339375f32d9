"""The bytes of the KV layouts with several block tables: a pool size per table."""

from __future__ import annotations

from infermix.toolkit.pool_store import PagedStore, copy_blocks

from infermix_kv.hybrid import table_bases


class HybridStore(PagedStore):
    """`copy` takes blocks numbered through over all tables; what belongs to one table is copied in its layers."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        bases = table_bases(self.shape)
        for index in range(len(self.shape.groups)):
            table = self.shape.table_of(index)
            first, last = bases[table], bases[table] + self.shape.blocks_of(table)
            own = [(source - first, target - first) for source, target in pairs if first <= source <= last]
            copy_blocks(self._stacks[index], own)
