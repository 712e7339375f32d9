"""Facts about parts for the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape


def table_facts(shape: KVShape) -> dict[str, Any]:
    """Bytes and blocks per block table where there are several or rings, and the longest piece of a prompt."""
    if not shape.table_limits:
        return {}
    tables = []
    for number in range(shape.num_tables):
        members = [group for index, group in enumerate(shape.groups) if shape.table_of(index) == number]
        block_bytes = shape.bytes_of_slots(members) * shape.block_size
        tables.append({
            "layers": sum(len(group.layers) for group in members),
            "windows": sorted({group.window for group in members if group.window is not None}),
            "blocks": shape.blocks_of(number),
            "blocks_per_sequence": shape.table_limits[number] or shape.blocks_per_seq,
            "bytes": int(block_bytes * (shape.blocks_of(number) + 1)),
        })  # fmt: skip
    return {"tables": tables, "max_query_len": shape.max_query_len}


def count_values(names: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kernel in names.values():
        counts[kernel] = counts.get(kernel, 0) + 1
    return counts


def qualified_name(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
