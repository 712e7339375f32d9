"""Conformance of layouts that provide `kv:swap`: what went to the host comes back, bit for bit, wherever it lands."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from infermix.roles.kv_space import KVLayout, KVShape, SwapSpace
from infermix.toolkit.block_rows import BlockRows
from infermix.toolkit.block_swapper import BlockSwapper


def check_kv_swap(layout: KVLayout, shape: KVShape, device: str = "cpu") -> None:
    """Sequences leave and come back in another order while another one writes over the blocks that they left."""
    two = tuple(2 * shape.most_blocks_of(table) for table in range(shape.num_tables))
    shape = replace(shape, host_blocks=two)
    _Swaps(layout, shape, device).check()
    _check_refusals(cast(SwapSpace, layout.space(shape)), shape)


class _Swaps:
    def __init__(self, layout: KVLayout, shape: KVShape, device: str) -> None:
        self.shape, self.space = shape, cast(SwapSpace, layout.space(shape))
        store: Any = layout.store(shape, device, torch.float32)
        self.tensors: list[list[Tensor]] = [store.block_tensors(number) for number in range(shape.num_tables)]
        held = sum(tensor.numel() * tensor.element_size() for table in self.tensors for tensor in table)
        assert held == store.allocated_bytes(), f"block tensors have {held} bytes, not {store.allocated_bytes()}"
        # Room for three blocks makes every copy go through staging in several pieces.
        staging = 3 * max(BlockRows(table).block_bytes for table in self.tensors)
        ticks = itertools.count()
        self.swapper = BlockSwapper(store, shape, torch.device(device), lambda: next(ticks), staging)
        self.length = max(1, shape.max_model_len - 1)

    def check(self) -> None:
        saved = {seq_id: self.leave(seq_id) for seq_id in (0, 1)}
        assert self.space.usage().allocated_tokens == 0, "swapped-out sequences still hold device blocks"
        assert self.space.reserve(2, self.shape.max_model_len)
        self.fill(2)
        for seq_id in (1, 0):
            self.come_back(seq_id, saved[seq_id])
        figures = self.swapper.counters()
        assert figures["swap_in_bytes"] == figures["swap_out_bytes"] > 0, f"bytes that were counted: {figures}"

    def leave(self, seq_id: int) -> list[list[Tensor]]:
        assert self.space.reserve(seq_id, self.shape.max_model_len)
        saved = self.fill(seq_id)
        moves = self.space.swap_out(seq_id, self.length)
        assert moves is not None, f"{self.shape.host_blocks} host blocks do not take sequence {seq_id}"
        self.swapper.execute([moves])
        return saved

    def come_back(self, seq_id: int, saved: list[list[Tensor]]) -> None:
        moves = self.space.swap_in(seq_id, self.length)
        assert moves is not None, f"sequence {seq_id} does not come back although there is room"
        self.swapper.execute([moves])
        self.swapper.wait_for([seq_id])
        for tensors, blocks, kept in zip(self.tensors, self.tables(seq_id), saved, strict=True):
            for tensor, data in zip(tensors, kept, strict=True):
                same = torch.equal(tensor[blocks].cpu().view(torch.uint8), data.view(torch.uint8))
                assert same, f"sequence {seq_id} came back from the host with other bytes"

    def fill(self, seq_id: int) -> list[list[Tensor]]:
        """Random bytes in every block of a sequence; returns them per table and tensor."""
        generator = torch.Generator().manual_seed(seq_id)
        saved = []
        for tensors, blocks in zip(self.tensors, self.tables(seq_id), strict=True):
            data = []
            for tensor in tensors:
                shape = tensor[blocks].contiguous().view(torch.uint8).shape
                noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(tensor.dtype)
                tensor[blocks] = noise.to(tensor.device)
                data.append(noise)
            saved.append(data)
        return saved

    def tables(self, seq_id: int) -> list[list[int]]:
        """Distinct blocks of a sequence per table, without the sink."""
        count = -(-self.length // self.shape.block_size)
        tables = (self.space.block_table(seq_id, number)[:count] for number in range(self.shape.num_tables))
        return [
            [block for block in dict.fromkeys(table) if block != self.shape.blocks_of(number)]
            for number, table in enumerate(tables)
        ]


def _check_refusals(space: SwapSpace, shape: KVShape) -> None:
    """A full host changes nothing; a released sequence gives its host blocks back."""
    moved = []
    for seq_id in (10, 11, 12):
        assert space.reserve(seq_id, shape.max_model_len)
        before = space.usage()
        if space.swap_out(seq_id, shape.max_model_len) is None:
            assert space.usage() == before, "a refused swap changed the space"
            space.release(seq_id)
        else:
            moved.append(seq_id)
    assert moved[:2] == [10, 11], "host blocks for two sequences did not take two"
    for seq_id in moved:
        space.release(seq_id)
    assert space.reserve(13, shape.max_model_len)
    assert space.swap_out(13, shape.max_model_len) is not None, "released sequences kept their host blocks"
    assert space.swap_in(13, shape.max_model_len) is not None, "an empty space did not take a sequence back"
    space.release(13)
    assert space.usage().allocated_tokens == 0, "something is still allocated at the end"
