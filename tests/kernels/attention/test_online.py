"""Online softmax in tiles against the whole softmax: every feature, any tile, any order of merging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix_kernels.reference.attention import attend, visible_keys
from infermix_kernels.reference.online import merge, nothing_seen, of_tile, online_attention, result


def drawn(n: int, context: int, heads: tuple[int, int] = (6, 2), dims: tuple[int, int] = (16, 12)) -> Any:
    torch.manual_seed(n * context)
    sizes = ((n, heads[0], dims[0]), (context, heads[1], dims[0]), (context, heads[1], dims[1]))
    return tuple(torch.randn(size, dtype=torch.float64) for size in sizes)


@pytest.mark.parametrize("tile_tokens", [1, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("n", "context"), [(1, 1), (1, 40), (9, 9), (5, 33)])
def test_tiles_give_the_whole_softmax(
    n: int, context: int, sinks: bool, softcap: float | None, window: int | None, tile_tokens: int
) -> None:
    q, k, v = drawn(n, context)
    scores = torch.linspace(-1, 3, 6, dtype=torch.float64) if sinks else None
    visible = visible_keys(n, context, window, None, q.device)
    expected = attend(q, k, v, visible, 0.3, softcap, scores)
    found = online_attention(
        q, k, v, scale=0.3, window=window, softcap=softcap, sinks=scores, tile_tokens=tile_tokens
    )
    assert (found - expected).abs().max() < 1e-13


def test_trees() -> None:
    q, k, v = drawn(4, 21)
    bits = torch.tensor([0b0001, 0b0011, 0b0101, 0b1101])
    expected = attend(q, k, v, visible_keys(4, 21, None, bits, q.device), 0.3, None, None)
    for tile_tokens in (1, 6, 18, 64):
        found = online_attention(q, k, v, scale=0.3, tree_bits=bits, tile_tokens=tile_tokens)
        assert (found - expected).abs().max() < 1e-13


def test_parts_merge_in_any_order() -> None:
    q, k, v = drawn(3, 30)
    everything = torch.ones(3, 30, dtype=torch.bool)
    parts = [
        of_tile(q, k[cut], v[cut], everything[:, cut], 0.3) for cut in (slice(0, 4), slice(4, 25), slice(25, 30))
    ]
    expected = attend(q, k, v, everything, 0.3, None, None)
    for a, b, c in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        assert (result(merge(merge(parts[a], parts[b]), parts[c])) - expected).abs().max() < 1e-13


def test_scores_that_would_overflow_and_rows_that_see_nothing() -> None:
    q, k, v = drawn(2, 8)
    visible = torch.ones(2, 8, dtype=torch.bool)
    visible[1] = False
    found = result(merge(nothing_seen(q, 12), of_tile(q, k, v, visible, 1e4)))
    assert torch.isfinite(found).all()
    assert not found[1].any()
    best = torch.einsum("hd,thd->ht", q[0], k.repeat_interleave(3, dim=1)).argmax(-1)
    assert torch.allclose(found[0], v.repeat_interleave(3, dim=1)[best, torch.arange(6)])
