"""Models with recurrent layers: their states live in an indexed pool, their batches are rectangles.

Attention runs over flat batches of any mixture; a recurrence does not, since every sequence starts from a state of
its own. So a batch is cut into parts: each new prompt alone, as `[1, n]`, and runs of sequences that continue with
equally many tokens, as `[B, n]`. The states of a part are gathered from the pool, handed to transformers in its own
cache object, and scattered back. The state after m tokens lies in slot m modulo the slots of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infermix.cost.carried import carrier_of
from infermix.engine.bridge import Joint
from infermix.engine.probe import LayerProbe
from infermix.errors import Unsupported
from infermix.roles.batch import Batch, GroupBatch
from infermix.roles.facts import StateTensor
from infermix.roles.families import check_family
from infermix.roles.kv_space import LayerState

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.cost.carried import Carried
    from infermix.roles.kv_space import KVGroup

#: Families whose every recurrent layer continues several tokens at once from a state. The scans of Mamba's first
#: generation start from nothing whenever they see more than one token, so there they go one by one.
_CONTINUES_CHUNKS = frozenset(
    {
        "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "mamba2", "nemotron_h",
        "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "rwkv",
    }
)  # fmt: skip


class Part(NamedTuple):
    """Sequences `first` to `last` (exclusive) of a batch, `query_len` new tokens each; `fresh` ones have no past."""

    first: int
    last: int
    query_len: int
    fresh: bool


def parts_of(batch: Batch, batched: bool = True) -> Iterator[Part]:
    """In order: each new prompt alone; neighbours that continue with equally many tokens together if `batched`."""
    assert batch.host_context_lens is not None
    known = list(zip(batch.query_lens, batch.host_context_lens, strict=True))
    first = 0
    while first < len(known):
        query_len, context = known[first]
        last = first + 1
        if batched and query_len < context:
            while last < len(known) and known[last][0] == query_len < known[last][1]:
                last += 1
        yield Part(first, last, query_len, fresh=query_len == context)
        first = last


class RecurrentJoint(Joint):
    """The joint over a store that keeps states.

    Raises `Unsupported` when the model carries other states than `states`, what the cost model derived from the
    config (`None`: not known). Not capturable.
    """

    def __init__(
        self, model: Any, groups: tuple[KVGroup, ...] | None = None, states: tuple[LayerState, ...] | None = None
    ) -> None:
        self._expected = states
        carrier = carrier_of(model)
        if carrier is None:
            raise Unsupported(f"{type(model).__name__} takes no cache object that could carry its states")
        self._carrier = carrier
        super().__init__(model, groups)
        self._in_chunks = self.model_type in _CONTINUES_CHUNKS

    def forward(self, batch: Batch, *, checked: bool = False) -> Tensor:
        """Logits `[R, V]`; host reads and copies are those of transformers' modules."""
        if self._context.store is None:
            raise Unsupported("the joint has no store: call attach first")
        if batch.state_slots is None or batch.host_logits_rows is None:
            raise Unsupported(f"{self.model_type} keeps recurrent states, which this KV layout has no place for")
        logits = []
        starts = [0, *torch.tensor(batch.query_lens).cumsum(0).tolist()]
        for part in parts_of(batch, self._carrier.batched):
            begin, end = starts[part.first], starts[part.last]
            rows = [row - begin for row in batch.host_logits_rows if begin <= row < end]
            part_batch = _slice(batch, part, begin, end)
            logits.append(self._forward_part(part_batch, part, rows, checked))
        return torch.cat(logits)

    def _use(self, name: str) -> None:
        if self._carrier.attending():  # transformers warns when a model without attention is told which one to use
            super()._use(name)

    def _refuse(self, config: Any) -> None:
        text = config.get_text_config(decoder=True)
        reason = check_family(text.model_type, text.to_dict(), with_states=True)
        if reason:
            raise Unsupported(reason)

    def _probe(self) -> LayerProbe:
        """Two tokens from nothing: every layer must call attention, or leave a state behind."""
        name, attending = type(self.model).__name__, self._carrier.attending()
        probe = self._context.probe = LayerProbe()
        try:
            _, carried = self._step(torch.zeros(1, 2, dtype=torch.int64, device=self.device), None, None, None)
        except TypeError as error:
            raise Unsupported(f"{name} cannot be driven by the joint: {error}") from error
        finally:
            self._context.probe = None
        if attending != probe.specs.keys():
            raise Unsupported(
                f"{name} called the attention function in layers {sorted(probe.specs)}, its cache has attention "
                f"layers {sorted(attending)}"
            )
        probe.require_windows(self.model.config.get_text_config(decoder=True).to_dict(), name)
        self.states = self._known_states(carried)
        return probe

    def _known_states(self, carried: Carried) -> tuple[LayerState, ...]:
        seen = tuple(
            LayerState(index, tuple(_fact(name, each, self.model.dtype) for name, each in kept.items()))
            for index, kept in carried.items()
        )
        if not seen:
            raise Unsupported(f"{type(self.model).__name__} leaves no state in its cache: it keeps them elsewhere")
        if self._expected is not None and _resolved(self._expected, self.model.dtype) != _resolved(
            seen, self.model.dtype
        ):
            raise Unsupported(f"the config says states {self._expected}, the loaded model carries {seen}")
        return self._expected or seen

    def _forward_part(self, batch: Batch, part: Part, rows: Sequence[int], checked: bool) -> Tensor:
        """`batch` holds the sequences of `part` alone; `rows` are those of its tokens whose logits are wanted."""
        assert batch.state_slots is not None
        assert batch.host_context_lens is not None
        past = [context - part.query_len for context in batch.host_context_lens]
        # Of the last tokens every state is kept, so these go one after the other, as decodes do anyway; what comes
        # before them goes at once where the model's scans can.
        at_once = part.query_len - len(batch.state_slots[0]) + 1 if part.fresh or self._in_chunks else 1
        edges = [0, *range(max(1, at_once), part.query_len + 1)]
        if len(edges) == 2:
            return self._rectangle(batch, past, part.query_len, rows, checked)
        kept: dict[int, Tensor] = {}
        for first, last in pairwise(edges):
            width = last - first
            wanted = [row for row in rows if first <= row % part.query_len < last]
            places = [row // part.query_len * width + row % part.query_len - first for row in wanted]
            piece = _columns(batch, first, last, part.query_len)
            logits = self._rectangle(piece, [count + first for count in past], width, places, checked)
            kept.update({row: logits[index : index + 1] for index, row in enumerate(wanted)})
        return torch.cat([kept[row] for row in rows]) if rows else logits[:0]

    def _rectangle(
        self, batch: Batch, past: Sequence[int], query_len: int, rows: Sequence[int], checked: bool
    ) -> Tensor:
        """One call of the model over `[B, query_len]` tokens behind `past`; reads the states, then stores them."""
        assert batch.state_slots is not None
        states: Mapping[int, Mapping[str, Tensor]] = self._context.store.states  # type: ignore[union-attr]
        self._context.batch = batch
        before = None
        if past[0]:
            read = self._index(
                [slots[count % len(slots)] for slots, count in zip(batch.state_slots, past, strict=True)]
            )
            before = {
                layer: {name: pool.index_select(0, read) for name, pool in pools.items()}
                for layer, pools in states.items()
            }
        shape = (len(past), query_len)
        wanted = self._index(rows or [0])
        if checked:
            self._context.probe = LayerProbe()
        try:
            logits, after = self._step(batch.input_ids.view(shape), batch.positions.view(shape), wanted, before)
            if self._context.probe is not None:
                self._context.probe.require_same(self._context.layers)
        finally:
            self._context.probe = None
        write = self._index(
            [slots[(count + query_len) % len(slots)] for slots, count in zip(batch.state_slots, past, strict=True)]
        )
        for layer, pools in states.items():
            for name, pool in pools.items():
                pool.index_copy_(0, write, after[layer][name].to(pool.dtype))
        return logits if rows else logits[:0]

    def _step(
        self, ids: Tensor, positions: Tensor | None, rows: Tensor | None, before: Carried | None
    ) -> tuple[Tensor, Carried]:
        """`ids [B, n]` -> logits of `rows` of the `B * n` tokens in order, and the states after them."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        arguments = self._carrier.arguments(before)
        extra = {"logits_to_keep": rows} if self._takes_rows and rows is not None and len(ids) == 1 else {}
        with torch.no_grad():
            out = self.model(input_ids=ids, position_ids=positions, infermix=self._context, **arguments, **extra)
        logits = out.logits.flatten(0, 1)
        if rows is not None and not extra:
            logits = logits.index_select(0, rows)
        return logits, self._carrier.collect(arguments, out)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def _slice(batch: Batch, part: Part, begin: int, end: int) -> Batch:
    """The sequences of `part` as a batch of their own; tensors are views."""
    sequences, tokens = slice(part.first, part.last), slice(begin, end)
    assert batch.host_context_lens is not None
    assert batch.state_slots is not None
    contexts = batch.host_context_lens[sequences]
    return Batch(
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        cu_seqlens_q=batch.cu_seqlens_q[part.first : part.last + 1] - begin,
        context_lens=batch.context_lens[sequences],
        logits_rows=batch.logits_rows,
        groups=tuple(GroupBatch(each.slot_mapping[tokens], each.block_tables[sequences]) for each in batch.groups),
        query_lens=batch.query_lens[sequences],
        host_context_lens=contexts,
        query_len=part.query_len,
        context_capacity=max(contexts),
        host_rows=None if batch.host_rows is None else batch.host_rows[sequences],
        state_slots=batch.state_slots[sequences],
    )


def _columns(batch: Batch, first: int, last: int, query_len: int) -> Batch:
    """Tokens `first` to `last` (exclusive) of every sequence's `query_len`, with nothing behind them yet."""
    assert batch.host_context_lens is not None
    later, width = query_len - last, last - first
    contexts = tuple(context - later for context in batch.host_context_lens)

    def cut(tokens: Tensor) -> Tensor:
        return tokens.view(-1, query_len)[:, first:last].flatten()

    return Batch(
        input_ids=cut(batch.input_ids),
        positions=cut(batch.positions),
        cu_seqlens_q=torch.arange(len(contexts) + 1, dtype=torch.int32, device=batch.input_ids.device) * width,
        context_lens=batch.context_lens - later,
        logits_rows=batch.logits_rows,
        groups=tuple(GroupBatch(cut(each.slot_mapping), each.block_tables) for each in batch.groups),
        query_lens=(width,) * len(contexts),
        host_context_lens=contexts,
        query_len=width,
        context_capacity=max(contexts),
        host_rows=batch.host_rows,
        state_slots=batch.state_slots,
    )


def _fact(name: str, tensor: Tensor, model_dtype: torch.dtype) -> StateTensor:
    dtype = None if tensor.dtype == model_dtype else str(tensor.dtype).removeprefix("torch.")
    return StateTensor(name, tuple(tensor.shape[1:]), dtype)


def _resolved(states: Sequence[LayerState], model_dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """States with the dtype written out, so that "the model's" and its name compare equal."""
    plain = str(model_dtype).removeprefix("torch.")
    return sorted(
        (state.layer, tuple((each.name, each.shape, each.dtype or plain) for each in state.tensors))
        for state in states
    )
