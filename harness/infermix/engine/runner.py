"""The model runner: a plan becomes a packed batch, the batch becomes logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from infermix.engine.branches import draft_depths
from infermix.engine.packing import PackEntry, num_dropped, pack
from infermix.engine.pieces import last_pieces
from infermix.errors import Unsupported
from infermix.roles.decoder import Forward, Want

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.engine.bridge import Joint
    from infermix.engine.graphs import CapturedStep, StepGraphs
    from infermix.engine.mixed_graphs import MixedGraphs, MixedStep
    from infermix.roles.batch import Batch
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.roles.kv_store import KVStore
    from infermix.roles.request import Sequence as SequenceState
    from infermix.roles.scheduler import Plan, Scheduled


class ModelRunner:
    """Runs a plan eagerly, or from a captured graph: one of `graphs` when all its sequences have the same, captured
    query length, else one of `mixed` when only last rows are wanted.

    Prompts that are longer than the layout takes at once (`KVShape.max_query_len`) run in pieces, a forward each.
    `num_eager_steps`, `num_graph_steps` and `num_mixed_graph_steps` (of the latter) say what happened how often.
    """

    def __init__(
        self, joint: Joint, space: KVSpace, store: KVStore, shape: KVShape, next_ids: Tensor, vocab_size: int
    ) -> None:
        self._joint, self._space, self._store, self._shape = joint, space, store, shape
        self._next_ids = next_ids
        self._take_copies = getattr(space, "take_copies", None)
        self.vocab_size = vocab_size
        self.graphs: StepGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self.reset_counters()

    def reset_counters(self) -> None:
        self.num_eager_steps = self.num_graph_steps = self.num_mixed_graph_steps = 0

    def counters(self) -> dict[str, float]:
        """Steps since the last reset, and graphs captured so far."""
        captures = sum(len(graphs.keys) for graphs in (self.graphs, self.mixed) if graphs is not None)
        return {
            "eager_steps": float(self.num_eager_steps),
            "graph_steps": float(self.num_graph_steps),
            "mixed_graph_steps": float(self.num_mixed_graph_steps),
            "graph_captures": float(captures),
        }

    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        self.copy_blocks()
        limit = self._shape.max_query_len
        if limit is None or all(entry.num_new_tokens <= limit for entry in plan.entries):
            return self._forward(plan.entries, want)
        if want.all_logits or want.hidden:
            raise Unsupported(
                f"the KV layout takes {limit} new tokens of a sequence at once when all rows are wanted"
            )
        with last_pieces(plan.entries, limit, lambda piece: self._forward(piece, Want())) as rest:
            return self._forward(rest, want)

    def _forward(self, entries: Sequence[Scheduled], want: Want) -> Forward:
        self._evict(entries)
        rows = self._rows(entries)
        step = self._captured(rows)
        if step is not None:
            self.num_graph_steps += 1
            return self._replay(step, rows, want)
        mixed = self._captured_mixed(entries, want)
        if mixed is not None:
            self.num_graph_steps += 1
            self.num_mixed_graph_steps += 1
            return self._replay_mixed(mixed, entries, want)
        self.num_eager_steps += 1
        return self._eager([entry for entry in rows if entry is not None], want)

    def reserve(self, sequence: SequenceState, num_tokens: int) -> bool:
        return self._space.reserve(sequence.seq_id, num_tokens)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._store.copy(list(pairs))

    def _evict(self, entries: Sequence[Scheduled]) -> None:
        """Let a layout that drops tokens make room before anything of this step is packed."""
        evictions = getattr(self._space, "evictions", None)
        if evictions is None:
            return
        for entry in entries:
            self._cached(entry)
        self._joint.evict(evictions())

    def _cached(self, entry: Scheduled) -> int:
        """Tokens of the sequence that are in the cache before this step."""
        seq = entry.sequence
        return seq.num_computed - num_dropped(self._space, seq.seq_id, seq.num_computed, entry.num_new_tokens)

    def copy_blocks(self) -> None:
        """Make the copies that copy-on-write asks for; before anything else changes the store."""
        if self._take_copies is not None and (pairs := self._take_copies()):
            self._store.copy(list(pairs))

    def _rows(self, entries: Sequence[Scheduled]) -> list[Scheduled | None]:
        """Entries in batch order; a layout with fixed rows puts each sequence at its row and leaves holes."""
        if not self._space.fixed_rows:
            return list(entries)
        place = {self._space.block_table(entry.sequence.seq_id)[0]: entry for entry in entries}
        return [place.get(row) for row in range(max(place) + 1)]

    def _captured(self, rows: Sequence[Scheduled | None]) -> CapturedStep | None:
        if self.graphs is None:
            return None
        entries = [entry for entry in rows if entry is not None]
        query_len = entries[0].num_new_tokens
        if any(entry.num_new_tokens != query_len for entry in entries):
            return None
        context = max(map(self._cached, entries)) + query_len
        return self.graphs.find(len(rows), query_len, context)

    def _captured_mixed(self, entries: Sequence[Scheduled], want: Want) -> MixedStep | None:
        if self.mixed is None or want != Want():
            return None
        context = max(self._cached(entry) + entry.num_new_tokens for entry in entries)
        return self.mixed.find(len(entries), sum(entry.num_new_tokens for entry in entries), context)

    def _replay_mixed(self, step: MixedStep, entries: Sequence[Scheduled], want: Want) -> Forward:
        assert self.mixed is not None
        rows, sequences = self._logits_rows(entries, want)
        lanes = [sequence.lane for sequence in sequences]
        self.mixed.buffers.fill(entries, rows, lanes, step.num_tokens, self._space)
        step.graph.replay()
        count = len(rows)
        return Forward(step.logits[:count], sequences, step.lanes[:count], most_likely=step.most_likely[:count])

    def _replay(self, step: CapturedStep, rows: Sequence[Scheduled | None], want: Want) -> Forward:
        step.buffers.fill(rows, self._space)
        step.graph.replay()
        kept, sequences = _kept_rows(rows, step.buffers.query_len, want)
        positions = _positions([entry for entry in rows if entry is not None], want)
        outputs = (step.logits, step.token_lanes, step.most_likely)
        if kept == list(range(len(kept))):
            logits, lanes, ids = (None if each is None else each[: len(kept)] for each in outputs)
        else:
            index = _to_device(kept, step.logits.device)
            logits, lanes, ids = (None if each is None else each.index_select(0, index) for each in outputs)
        assert logits is not None
        assert lanes is not None
        forward = Forward(logits, sequences, lanes, positions, most_likely=ids)
        if want.hidden:
            assert step.hidden is not None
            forward.hidden, forward.hidden_rows = step.hidden, kept
            owners = (entry.sequence.seq_id if entry else None for entry in rows)
            starts = {seq_id: row * step.buffers.query_len for row, seq_id in enumerate(owners) if seq_id is not None}
            forward.first_rows = starts
        return forward

    def _eager(self, entries: Sequence[Scheduled], want: Want) -> Forward:
        device = self._next_ids.device
        rows, sequences = self._logits_rows(entries, want)
        packed = [self._pack_entry(entry) for entry in entries]
        batch = pack(packed, self._space, self._shape, device, logits_rows=rows)
        if self._shape.blocks_per_seq == 1:
            batch.host_rows = tuple(self._space.block_table(entry.seq_id)[0] for entry in packed)
        self._feed_sampled(batch, entries)
        logits = self._joint.forward(batch)
        lanes = _to_device([seq.lane for seq in sequences], device)
        forward = Forward(logits, sequences, lanes, _positions(entries, want))
        hidden = self._joint.take_hidden()
        if want.hidden:
            assert hidden is not None
            forward.hidden, forward.hidden_rows, forward.first_rows = hidden, rows, {}
            first = 0
            for entry, filled in zip(entries, packed, strict=True):
                forward.first_rows[entry.sequence.seq_id] = first + len(filled.token_ids) - entry.num_new_tokens
                first += len(filled.token_ids)
        return forward

    def _start(self, entry: Scheduled) -> int:
        return 0 if self._space.recompute else entry.sequence.num_computed

    def _pack_entry(self, entry: Scheduled) -> PackEntry:
        seq = entry.sequence
        stop = seq.num_computed + entry.num_new_tokens
        start = self._start(entry)
        known = seq.tokens[start : stop - len(entry.draft_ids)]
        padding = [0] * (stop - start - len(known) - len(entry.draft_ids))
        return PackEntry(seq.seq_id, [*known, *padding, *entry.draft_ids], start, entry.draft_parents)

    def _feed_sampled(self, batch: Batch, entries: Sequence[Scheduled]) -> None:
        """Tokens still in flight are read from the device table; each is the last of its sequence before drafts."""
        targets, lanes, end = [], [], 0
        for entry in entries:
            seq = entry.sequence
            stop = seq.num_computed + entry.num_new_tokens
            end += stop - self._start(entry)
            if stop - len(entry.draft_ids) > len(seq.tokens):
                targets.append(end - 1 - len(entry.draft_ids))
                lanes.append(seq.lane)
        if targets:
            device = self._next_ids.device
            sampled = self._next_ids[_to_device(lanes, device)]
            batch.input_ids.index_copy_(0, _to_device(targets, device), sampled)

    def _logits_rows(self, entries: Sequence[Scheduled], want: Want) -> tuple[list[int], list]:
        rows, sequences, first = [], [], 0
        for entry in entries:
            count = entry.sequence.num_computed + entry.num_new_tokens - self._start(entry)
            hidden = count - entry.num_new_tokens
            wanted = _wanted_offsets(entry, want)
            rows += [first + hidden + offset for offset in wanted]
            sequences += [entry.sequence] * len(wanted)
            first += count
        return rows, sequences


def _kept_rows(rows: Sequence[Scheduled | None], query_len: int, want: Want) -> tuple[list[int], list[SequenceState]]:
    """Rows of a captured step's logits that are wanted, and whose they are."""
    kept: list[int] = []
    sequences: list[SequenceState] = []
    for row, entry in enumerate(rows):
        if entry is not None:
            wanted = _wanted_offsets(entry, want)
            kept += [row * query_len + offset for offset in wanted]
            sequences += [entry.sequence] * len(wanted)
    return kept, sequences


def _wanted_offsets(entry: Scheduled, want: Want) -> Sequence[int]:
    """Which of an entry's new tokens get a logits row."""
    if want.all_logits:
        return range(entry.num_new_tokens)
    if entry.num_own_tokens != entry.sequence.num_uncomputed:
        return ()
    last = entry.num_new_tokens - 1
    if not want.draft_logits:
        return (last,)
    own, drafts = entry.num_own_tokens, len(entry.draft_ids)
    return range(own - 1, own + (drafts if want.most_drafts is None else min(drafts, want.most_drafts)))


def _positions(entries: Sequence[Scheduled], want: Want) -> list[int] | None:
    """Position of the token that each row predicts; `None` where it is the sequence's next."""
    if not (want.all_logits or want.draft_logits):
        return None
    return [
        entry.sequence.num_computed + depth + 1
        for entry in entries
        for depth in _depths(entry, _wanted_offsets(entry, want))
    ]


def _depths(entry: Scheduled, offsets: Sequence[int]) -> Sequence[int]:
    """How far new tokens lie behind what is cached: their offsets, but for drafts in a tree."""
    if not entry.draft_parents:
        return offsets
    own = entry.num_own_tokens
    depths = draft_depths(entry.draft_parents)
    return [offset if offset < own else own - 1 + depths[offset - own] for offset in offsets]


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
