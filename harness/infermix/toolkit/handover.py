"""Hand-over of a sequence's KV between workers: a description that can be checked, and the bytes, in host memory.

The format is one line of JSON (`ParcelHeader`), a newline, and for every block table the rows of its blocks: block
after block, in each the tensors of `KVStore.block_tensors` one after the other, as they lie in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from infermix.errors import InfermixError, Unsupported
from infermix.roles.kv_space import KVShape
from infermix.toolkit.block_rows import BlockRows

if TYPE_CHECKING:
    from infermix.roles.kv_store import KVStore

FORMAT_VERSION = 1


class TensorHeader(msgspec.Struct, frozen=True):
    """What one block takes of one tensor: its shape without the block dimension, and its dtype."""

    shape: tuple[int, ...]
    dtype: str


class ParcelHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must be equal on both sides, then what is in the parcel.

    `layout` is what the two sides call their layout, options included. `groups` are the layers, KV heads, key and
    value width and window of each KV group; `tensors[t]` those of block table t and `num_blocks[t]` how many blocks
    follow. `crc32` is that of the payload, 0 for one that stayed on its device.
    """

    version: int
    layout: str
    block_size: int
    groups: tuple[tuple[tuple[int, ...], int, int, int, int | None], ...]
    tensors: tuple[tuple[TensorHeader, ...], ...]
    num_tokens: int
    num_blocks: tuple[int, ...]
    crc32: int = 0


@dataclass(frozen=True)
class KVParcel:
    """`payload[t]` `[num_blocks[t], bytes of a block]` uint8, on the host (pinned when it came from a GPU) or not."""

    header: ParcelHeader
    payload: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(rows.numel() for rows in self.payload)

    def to_bytes(self) -> bytes:
        return b"".join((msgspec.json.encode(self.header), b"\n", *(_bytes(rows) for rows in self.payload)))

    @staticmethod
    def from_bytes(data: bytes) -> KVParcel:
        """Raises `InfermixError` for bytes that are no parcel, were cut off, or changed on the way."""
        line, found, rest = data.partition(b"\n")
        try:
            header = msgspec.json.decode(line, type=ParcelHeader)
        except msgspec.DecodeError as error:
            raise InfermixError(f"this is no KV parcel: {error}") from None
        if not found or zlib.crc32(rest) != header.crc32:
            raise InfermixError(f"the {len(rest)} bytes of a KV parcel do not have its checksum")
        payload, start = [], 0
        for count, tensors in zip(header.num_blocks, header.tensors, strict=True):
            size = count * sum(_size(tensor) for tensor in tensors)
            rows = torch.frombuffer(bytearray(rest[start : start + size]), dtype=torch.uint8) if size else _nothing()
            payload.append(rows.view(count, -1) if count else rows.view(0, 0))
            start += size
        return KVParcel(header, tuple(payload))


def export_parcel(
    store: KVStore, shape: KVShape, layout: str, blocks: Sequence[Sequence[int]], num_tokens: int
) -> KVParcel:
    """The blocks of one sequence, `blocks[t]` of block table t in order, with `num_tokens` tokens in them.

    Waits until everything launched before has run and the copy has arrived.
    """
    tables = _tables(store, shape)
    payload = tuple(_fetch(rows, ids) for rows, ids in zip(tables, blocks, strict=True))
    header = _header(tables, shape, layout)
    checksum = 0
    for rows in payload:
        checksum = zlib.crc32(_bytes(rows), checksum)
    counts = tuple(len(ids) for ids in blocks)
    return KVParcel(
        msgspec.structs.replace(header, num_tokens=num_tokens, num_blocks=counts, crc32=checksum), payload
    )


def gather_parcel(
    store: KVStore, shape: KVShape, layout: str, blocks: Sequence[Sequence[int]], num_tokens: int
) -> KVParcel:
    """As `export_parcel`, on the store's device and without a checksum; nothing is waited for."""
    tables = _tables(store, shape)
    payload = tuple(_gather(rows, ids).view(torch.uint8) for rows, ids in zip(tables, blocks, strict=True))
    counts = tuple(len(ids) for ids in blocks)
    header = _header(tables, shape, layout)
    return KVParcel(msgspec.structs.replace(header, num_tokens=num_tokens, num_blocks=counts), payload)


def split_parcel(header: ParcelHeader, data: Tensor) -> KVParcel:
    """A parcel out of all its rows in one, `data [n]` uint8. Raises `InfermixError` where `n` is not their size."""
    widths = [sum(map(_size, tensors)) for tensors in header.tensors]
    sizes = [count * width for count, width in zip(header.num_blocks, widths, strict=True)]
    if sum(sizes) != data.numel():
        raise InfermixError(f"{data.numel()} bytes are no KV parcel of {sum(sizes)}")
    parts = zip(data.split(sizes), header.num_blocks, widths, strict=True)
    return KVParcel(header, tuple(part.view(count, width) for part, count, width in parts))


def import_parcel(
    store: KVStore, shape: KVShape, layout: str, parcel: KVParcel, blocks: Sequence[Sequence[int]]
) -> None:
    """Write a parcel into `blocks`, which the space of this side has reserved, in the order of the other side's.

    Raises `Unsupported`, before anything is written, when the two sides do not keep the same things in a block.
    """
    tables = _tables(store, shape)
    _refuse_mismatch(parcel.header, _header(tables, shape, layout))
    counts = tuple(len(ids) for ids in blocks)
    if counts != parcel.header.num_blocks:
        raise Unsupported(f"a KV parcel of {parcel.header.num_blocks} blocks per table cannot go into {counts}")
    for rows, ids, data in zip(tables, blocks, parcel.payload, strict=True):
        if ids:
            device = rows.tensors[0].device
            moved = data.to(device, non_blocking=data.is_pinned())
            rows.scatter(torch.tensor(ids, dtype=torch.int64, device=device), moved.view(rows.unit))


def _refuse_mismatch(theirs: ParcelHeader, ours: ParcelHeader) -> None:
    for name in ("version", "layout", "block_size", "groups", "tensors"):
        sent, here = getattr(theirs, name), getattr(ours, name)
        if sent != here:
            raise Unsupported(f"a KV parcel with {name} {_short(sent)} cannot be imported where it is {_short(here)}")


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else f"{text[:200]}..."


def _tables(store: KVStore, shape: KVShape) -> list[BlockRows]:
    block_tensors = getattr(store, "block_tensors", None)
    if block_tensors is None:
        raise Unsupported(f"{type(store).__name__} does not say which tensors its blocks are in (block_tensors)")
    return [BlockRows(block_tensors(number)) for number in range(shape.num_tables)]


def _header(tables: Sequence[BlockRows], shape: KVShape, layout: str) -> ParcelHeader:
    return ParcelHeader(
        version=FORMAT_VERSION,
        layout=layout,
        block_size=shape.block_size,
        groups=tuple((g.layers, g.num_kv_heads, g.key_dim, g.value_dim, g.window) for g in shape.groups),
        tensors=tuple(tuple(map(_tensor_header, rows.tensors)) for rows in tables),
        num_tokens=0,
        num_blocks=(),
    )


def _tensor_header(tensor: Tensor) -> TensorHeader:
    return TensorHeader(tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))


def _gather(rows: BlockRows, ids: Sequence[int]) -> Tensor:
    device = rows.tensors[0].device if rows.tensors else torch.device("cpu")
    gathered = torch.empty((len(ids), rows.width), dtype=rows.unit, device=device)
    rows.gather(torch.tensor(ids, dtype=torch.int64, device=device), gathered)
    return gathered


def _fetch(rows: BlockRows, ids: Sequence[int]) -> Tensor:
    host = gathered = _gather(rows, ids)
    if gathered.device.type == "cuda":
        host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
        host.copy_(gathered)
    return host.view(torch.uint8)


def _bytes(rows: Tensor) -> memoryview:
    data: Any = rows.contiguous().numpy()
    return memoryview(data).cast("B") if rows.numel() else memoryview(b"")


def _size(tensor: TensorHeader) -> int:
    size: int = getattr(torch, tensor.dtype).itemsize
    for extent in tensor.shape:
        size *= extent
    return size


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
