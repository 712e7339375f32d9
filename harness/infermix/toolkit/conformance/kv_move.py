"""Conformance of `KVStore.move`: tokens of the last step change places, and everything else stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from infermix.toolkit.conformance.kv import KVLife


def check_kv_move(life: KVLife, rounds: int = 20) -> None:
    """Grow sequences, keep some of their newest tokens as accepted paths do, cut; every read must agree."""
    for _ in range(rounds):
        life.append()
        keep_paths(life)
    life.end()


def keep_paths(life: KVLife) -> None:
    """Of the last tokens of each sequence only some stay, moved together; all tables in one call each."""
    paths = {seq_id: _draw_path(life, seq_id) for seq_id in sorted(life.known)}
    for table in range(life.shape.num_tables):
        sources: list[int] = []
        targets: list[int] = []
        for seq_id, path in paths.items():
            first = life.length(seq_id) - life.starts[seq_id]
            for place, token in enumerate(path, life.length(seq_id) - first):
                sources.append(_slot(life, seq_id, table, token))
                targets.append(_slot(life, seq_id, table, place))
        if sources:
            life.store.move(table, sources, targets)
    for seq_id, path in paths.items():
        start = life.starts[seq_id]
        order = [*range(start), *path]
        life.known[seq_id] = {layer: _taken(pair, order) for layer, pair in life.known[seq_id].items()}
        life.space.truncate(seq_id, len(order))


def _draw_path(life: KVLife, seq_id: int) -> list[int]:
    """Some tokens of the last step, in order; the first of them always, so that no sequence is cut to nothing."""
    start, stop = life.starts[seq_id], life.length(seq_id)
    return [token for token in range(start, stop) if token == start or life.rng.random() < 0.6]


def _slot(life: KVLife, seq_id: int, table: int, token: int) -> int:
    size = life.shape.block_size
    return life.space.block_table(seq_id, table)[token // size] * size + token % size


def _taken(pair: tuple[Tensor, Tensor], order: list[int]) -> tuple[Tensor, Tensor]:
    return pair[0][order], pair[1][order]
