"""Conformance of attention with a tree mask: every new token against plain attention over its own branch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from infermix.errors import Unsupported
from infermix.roles.attention import AttentionBackend, LayerSpec
from infermix.roles.batch import MAX_TREE_TOKENS, Batch
from infermix.toolkit.conformance.attention import (
    AttentionCase,
    compare,
    draw_case,
    layers_of,
    pack_case,
    record_step,
    slack_of,
    views_of,
)
from infermix.toolkit.plain_attention import plain_attention

#: (query lengths, context lengths): trees of one and of several sizes, beside a decode and a prompt too long for one.
LENGTHS = (
    ((7,), (7,)),
    ((5, 5, 5), (19, 5, 60)),
    ((33, 33), (40, 90)),
    ((1, 6, 70, 64), (9, 31, 75, 64)),
)

Parents = list[list[int]]


def check_trees(
    backend: AttentionBackend,
    needs: frozenset[str],
    provided: frozenset[str],
    device: str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> int:
    """Random trees over every view, eager and captured; returns the number of comparisons.

    A backend may refuse windows beside trees, as long as it says so.
    """
    count = 0
    for layer in _some_layers(provided):
        for query_lens, context_lens in LENGTHS:
            case = draw_case(layer, query_lens, context_lens, generator, device, dtype)
            parents = [_draw_parents(length, generator) for length in query_lens]
            for view_name, block_size in views_of(needs, (8,)):
                if view_name == "quantized":
                    continue
                try:
                    _check(backend, case, parents, (view_name, block_size), capture="graph:no" not in provided)
                except Unsupported:
                    assert layer.window is not None, "a tree mask without a window was refused"
                    break
                count += 1
    return count


def _some_layers(provided: frozenset[str]) -> list[LayerSpec]:
    """Grouped heads, and what else a backend provides that meets the mask."""
    layers = [layer for layer in layers_of(provided) if layer.causal]
    plain = next(layer for layer in layers if layer.num_heads != layer.num_kv_heads)
    return [plain, *(layer for layer in layers if layer.sinks is not None or (layer.window or 0) > 1)]


def _draw_parents(num_tokens: int, generator: torch.Generator) -> list[int]:
    """Of every new token the new token before it; the first one is the root."""
    return [-1, *(int(torch.randint(index, (1,), generator=generator)) for index in range(1, num_tokens))]


def _branch(parents: list[int], token: int) -> list[int]:
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _branches(parents: list[int]) -> list[list[int]]:
    """What each new token sees of the new ones; a causal line where there are too many."""
    if len(parents) > MAX_TREE_TOKENS:
        return [list(range(token + 1)) for token in range(len(parents))]
    return [_branch(parents, token) for token in range(len(parents))]


def tree_reference(case: AttentionCase, parents: Parents) -> Tensor:
    """`[T, H, Dv]` in fp64: each token alone, over what is cached and its own branch."""
    rows, start = [], 0
    for keys, values, own in zip(case.keys, case.values, parents, strict=True):
        past = keys.shape[0] - len(own)
        for token, branch in enumerate(_branches(own)):
            seen = [*range(past), *(past + each for each in branch)]
            query = case.q[start + token : start + token + 1]
            rows.append(plain_attention(query, keys[seen], values[seen], case.layer))
        start += len(own)
    return torch.cat(rows)


def _with_tree(batch: Batch, parents: Parents) -> Batch:
    """`parents` may be fewer than the batch's rows: padding has bits of 0."""
    bits: list[int] = []
    depths: list[int] = []
    for own in parents:
        for branch in _branches(own):
            number = sum(1 << each for each in branch) & ((1 << 64) - 1)
            bits.append(number - (1 << 64) if number >> 63 else number)
            depths.append(len(branch) - 1)
    padding = [0] * (batch.num_tokens - len(bits))
    first = torch.tensor([int(batch.positions[start]) for start in batch.cu_seqlens_q[:-1].tolist()])
    lens = torch.tensor(batch.query_lens)
    positions = first.repeat_interleave(lens) + torch.tensor([*depths, *padding])
    device = batch.positions.device
    return replace(
        batch, positions=positions.to(device), tree_mask=torch.tensor([*bits, *padding], device=device), extra={}
    )


def _check(
    backend: AttentionBackend, case: AttentionCase, parents: Parents, view_of: tuple[str, int], *, capture: bool
) -> None:
    view_name, block_size = view_of
    label = f"{type(backend).__name__}, tree, {view_name} view, queries {case.query_lens}, {case.layer}"
    expected = tree_reference(case, parents)
    view, batch = pack_case(case, view_name, block_size, captured=False)
    slack = slack_of(view_name, case.q.dtype)
    compare(backend.forward(case.q, view, _with_tree(batch, parents), case.layer), expected, label, slack)
    if not capture or len(set(case.query_lens)) > 1 or view_name == "ragged":
        return
    view, batch = pack_case(case, view_name, block_size, captured=True, padding=1)
    batch = _with_tree(batch, parents)
    assert batch.tree_mask is not None
    wanted, length = batch.tree_mask.clone(), case.query_lens[0]
    causal = torch.tensor([-1 if bit == 63 else (2 << bit) - 1 for bit in range(length)])
    batch.tree_mask.copy_(causal.repeat(batch.num_seqs))
    q = torch.cat((case.q, case.q.new_full((length, *case.q.shape[1:]), float("nan"))))
    out, replay = record_step(backend, q, view, batch, case.layer)
    batch.tree_mask.copy_(wanted)
    out = replay()
    compare(out[: len(case.q)], expected, f"captured, {label}", slack)
    assert (out[len(case.q) :] == 0).all(), f"captured, {label}: padded rows are not zero"
