"""Groups that have become old are quantized by the kernel to the bits of plain PyTorch: started interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from infermix_kernels.group_write import write_groups
from infermix_kernels.reference import grouped as meant
from infermix_kernels.reference.grouped import GroupedPools
from torch import Tensor

HEADS, CAPACITY, GROUPS = 2, 40, 5


def random_pools(bits: int, size: int, dims: tuple[int, int], generator: torch.Generator) -> GroupedPools:
    def tail(dim: int) -> Tensor:
        return torch.randn(2, CAPACITY, HEADS, dim, generator=generator) * 3

    return GroupedPools(
        torch.zeros(GROUPS, HEADS, size, dims[0] * bits // 8, dtype=torch.uint8),
        torch.zeros(GROUPS, HEADS, size, dims[1] * bits // 8, dtype=torch.uint8),
        torch.zeros(GROUPS, HEADS, dims[0], 2, dtype=torch.float16),
        torch.zeros(GROUPS, HEADS, size, dims[1] // size, 2, dtype=torch.float16),
        tail(dims[0]),
        tail(dims[1]),
        block_size=size,
        num_recent=1,
    )


@pytest.mark.parametrize(("bits", "size", "dims"), [(4, 16, (32, 16)), (2, 16, (48, 32)), (4, 24, (40, 48))], ids=str)
@pytest.mark.parametrize("with_new", [False, True])
def test_the_bits_of_plain_pytorch(bits: int, size: int, dims: tuple[int, int], with_new: bool) -> None:
    """Three groups, the last of which goes to the sink; equal channels and one far from zero among them."""
    generator = torch.Generator().manual_seed(bits)
    pools = random_pools(bits, size, dims, generator)
    pools.tail_keys[..., 0], pools.tail_keys[..., 1] = 0.5, pools.tail_keys[..., 1] + 1000
    k, v = (torch.randn(9, HEADS, dim + 3, generator=generator)[..., :dim] for dim in dims)
    old = torch.randint(2 * CAPACITY, (3, size), generator=generator)
    fresh = torch.randint(-6, 9, (3, size), generator=generator).clamp(min=-1) if with_new else None
    target, plain = torch.tensor([3, 0, 4]), _copied(pools)
    gathered = [gather(tail, new, old, fresh) for tail, new in ((pools.tail_keys, k), (pools.tail_values, v))]
    meant.write_groups(*gathered, plain, target)
    write_groups(k, v, pools, target, old, fresh, num_groups=4)
    for name in ("keys", "values", "key_factors", "value_factors"):
        ours, theirs = getattr(pools, name), getattr(plain, name)
        assert torch.equal(ours[:4], theirs[:4]), name
        assert not ours[4].any(), name


def moved(pools: GroupedPools, device: str) -> GroupedPools:
    names = ("keys", "values", "key_factors", "value_factors", "tail_keys", "tail_values")
    return replace(pools, **{name: getattr(pools, name).to(device) for name in names})


def _copied(pools: GroupedPools) -> GroupedPools:
    names = ("keys", "values", "key_factors", "value_factors")
    return replace(pools, **{name: getattr(pools, name).clone() for name in names})


def gather(tail: Tensor, new: Tensor, old: Tensor, fresh: Tensor | None) -> Tensor:
    rows = tail.flatten(0, 1)[old]
    return rows if fresh is None else torch.where((fresh < 0)[..., None, None], rows, new[fresh.clamp(min=0)])


def test_indices_and_widths_that_do_not_fit_are_refused() -> None:
    pools = random_pools(4, 16, (32, 16), torch.Generator())
    k, v, old = torch.zeros(1, HEADS, 32), torch.zeros(1, HEADS, 16), torch.zeros(1, 16, dtype=torch.int64)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"target": torch.zeros(1, dtype=torch.int32)}, "target must be contiguous int64"),
        ({"old": old[:, :8]}, "old has shape"),
        ({"k": torch.zeros(1, HEADS, 30)}, "k has shape"),
    ]
    for changes, message in wrong:
        given = {"k": k, "v": v, "target": torch.zeros(1, dtype=torch.int64), "old": old, **changes}
        with pytest.raises(ValueError, match=message):
            write_groups(**given, pools=pools, fresh=None, num_groups=4)
