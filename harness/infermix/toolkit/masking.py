"""Logits masks per request, composed with any decoder: a grammar, a vocabulary, a list of allowed answers.

The decoder that is wrapped sees a sampler whose logits are masked, so greedy and sampled tokens, verification rows
and the distributions of rejection sampling all belong to the constrained target. A draft model draws unmasked: what
the mask forbids has probability 0 at the target and does not stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from infermix.errors import Unsupported, UserError
from infermix.roles.decoder import Decoder, Emission, Forward, Runner, Sampler
from infermix.roles.request import Request, Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.sampling import stop_tokens
from infermix.toolkit.verification import completes


class TokenMasks(Protocol):
    """Which tokens may come next.

    Optional:

    - `fill_all(sequences, drafts, bits) -> bool`, `fill` for every row of a step at once, row i for `sequences[i]`
      and `drafts[i]`. It writes all of `bits`, which hold anything before; `False`: no row is limited.
    - `begin(sequences, bits) -> Callable[[], bool] | None` begins what `fill_all` would do for rows without drafts
      and returns: a thread goes on, in which torch is not in inference mode. Calling what it returned waits for the
      end; that gives, or raises, what `fill_all` would. Nothing else is asked of the masks before. `None`: not worth
      a thread, `fill_all` will do.
    """

    def fill(self, sequence: Sequence, drafts: tuple[int, ...], bits: Tensor, row: int) -> bool:
        """Write into `bits[row]` what may come behind `sequence.tokens` and `drafts`.

        `bits [R, ceil(V / 32)]` int32 on the CPU; bit i of word j stands for token 32 j + i (`pack_bits`). `False`:
        any may, also behind a forbidden draft, and the row's bits stay set.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended or starts over."""
        ...


#: Of one row, kept on the device: a grammar has few, and they come again. 128,256 tokens take 8 MB.
_MOST_KEPT = 64


@dataclass(slots=True)
class _Begun:
    """Masks that are being filled, row i of `bits` for `sequences[i]`; `wait` is what `TokenMasks.begin` returned."""

    sequences: list[Sequence]
    bits: Tensor
    wait: Callable[[], bool]

    def rows_of(self, sequences: Seq[Sequence]) -> Tensor | None:
        """The rows of these, in their order; `None` where one of them is missing."""
        if sequences == self.sequences:
            return self.bits
        places = {sequence.seq_id: place for place, sequence in enumerate(self.sequences)}
        order = [places[sequence.seq_id] for sequence in sequences if sequence.seq_id in places]
        if len(order) < len(sequences):
            return None
        rows = torch.empty(len(order), self.bits.shape[1], dtype=torch.int32, pin_memory=self.bits.is_pinned())
        rows.numpy()[:] = self.bits.numpy()[order]
        return rows


class MaskingSampler:
    """A sampler whose forbidden tokens have no probability.

    Masks of a step that puts one row per sequence behind tokens that are known can be filled while its forward is
    launched and runs: `begin` before that, `settle` behind the step.
    """

    def __init__(self, sampler: Sampler, masks: TokenMasks) -> None:
        self.sampler, self._masks = sampler, masks
        self._fill = getattr(masks, "fill_all", self._fill_rows)
        #: Kept on the device: a step should not launch what is the same in every one.
        self._powers: Tensor | None = None
        self._kept: dict[bytes, Tensor] = {}
        self._begin = getattr(masks, "begin", None)
        self._begun: _Begun | None = None
        #: Makes rows for the logits of the last step, as those of the next will be.
        self._empty: Callable[[int], Tensor] | None = None

    def begin(self, plan: Plan) -> None:
        """Does nothing where masks cannot be filled beside the step, and in the first step."""
        if self._begin is None or self._empty is None:
            return
        sequences = [entry.sequence for entry in plan.entries if completes(entry)]
        if sequences:
            bits = self._empty(len(sequences))
            wait = self._begin(sequences, bits)
            self._begun = _Begun(sequences, bits, wait) if wait is not None else None

    def settle(self) -> None:
        """Masks that nobody asked for are waited for: sequences may change now."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.wait()

    def sample(self, forward: Forward) -> Tensor:
        return self.sampler.sample(self._masked(forward, [()] * len(forward.sequences)))

    def sample_rows(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        return self.sampler.sample_rows(self._masked(forward, drafts), drafts)

    def probabilities(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        return self.sampler.probabilities(self._masked(forward, drafts), drafts)

    def accept(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        self.sampler.accept(sequence, token_ids)

    def _masked(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Forward:
        logits, size = forward.logits, forward.logits.shape[-1]
        bits = self._filled(forward, drafts)
        if bits is None:
            return forward
        for row, (seq, own) in enumerate(zip(forward.sequences, drafts, strict=True)):
            if not own and seq.request.sampling.min_new_tokens:
                self._refuse_dead_end(seq, bits[row : row + 1], size)
        masked = logits.masked_fill(self._forbidden(bits, logits), float("-inf"))
        return replace(forward, logits=masked, most_likely=None)

    def _filled(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor | None:
        """`None` where no row is limited."""
        begun, self._begun = self._begun, None
        if begun is not None:
            limited = begun.wait()
            bits = None if any(drafts) else begun.rows_of(forward.sequences)
            if bits is not None:
                return bits if limited else None
        self._empty = _rows_for(forward.logits)
        bits = self._empty(len(forward.sequences))
        return bits if self._fill(forward.sequences, drafts, bits) else None

    def _forbidden(self, bits: Tensor, logits: Tensor) -> Tensor:
        """Bool like `logits`. One row is looked up before it is copied: most steps can do without four launches."""
        if len(bits) > 1:
            return self._unpacked(bits, logits)
        words = bits.numpy().tobytes()
        known = self._kept.get(words)
        if known is None:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            known = self._kept[words] = self._unpacked(bits.pin_memory() if logits.is_cuda else bits, logits)
        return known

    def _unpacked(self, bits: Tensor, logits: Tensor) -> Tensor:
        if self._powers is None:
            self._powers = powers_of_two(logits.device)
        return forbidden(bits.to(logits.device, non_blocking=True), logits.shape[-1], self._powers)

    def _fill_rows(self, sequences: Seq[Sequence], drafts: Seq[tuple[int, ...]], bits: Tensor) -> bool:
        """`TokenMasks.fill_all` of masks that fill row by row."""
        bits.fill_(-1)
        limited = False
        for row, (seq, own) in enumerate(zip(sequences, drafts, strict=True)):
            limited |= self._masks.fill(seq, own, bits, row)
        return limited

    def _refuse_dead_end(self, sequence: Sequence, bits: Tensor, size: int) -> None:
        """Raises `UserError` where a mask allows stop tokens alone and it is too early for them."""
        request, made = sequence.request, len(sequence.tokens) - sequence.num_prompt_tokens
        if made >= request.sampling.min_new_tokens:
            return
        stops = stop_tokens(request.sampling, getattr(self.sampler, "eos_token_ids", ()))
        allowed = ~forbidden(bits, size)[0]
        if int(allowed.sum()) <= len(stops) and stops.issuperset(allowed.nonzero().flatten().tolist()):
            raise UserError(
                f"request {request.request_id!r} has to have {request.sampling.min_new_tokens} tokens at least, but "
                f"what constrains it ends behind {made}",
                hint="lower min_new_tokens, or allow longer outputs",
            )


def _rows_for(logits: Tensor) -> Callable[[int], Tensor]:
    """Makes bits for so many rows of such logits, on the host; one alone is seldom copied, so it is not pinned."""
    words, on_gpu = -(-logits.shape[-1] // 32), logits.is_cuda
    return lambda rows: torch.empty(rows, words, dtype=torch.int32, pin_memory=on_gpu and rows > 1)


def pack_bits(mask: Tensor) -> Tensor:
    """Bool `[V]` on the CPU -> int32 `[ceil(V / 32)]`, a row of `TokenMasks.fill`."""
    words = np.zeros(-(-mask.numel() // 32) * 32, dtype=bool)
    words[: mask.numel()] = mask.numpy()
    return torch.from_numpy(np.packbits(words, bitorder="little").view(np.int32))


def powers_of_two(device: torch.device) -> Tensor:
    """uint8 `[8]`: the bits of a byte."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)


def forbidden(bits: Tensor, size: int, powers: Tensor | None = None) -> Tensor:
    """Bool `[R, size]` of `bits [R, ceil(size / 32)]`: the tokens whose bits are not set.

    Byte by byte, since a number of 32 bits per token would take as much memory as the logits. `powers` are
    `powers_of_two` of the device, for those who ask often.
    """
    powers = powers_of_two(bits.device) if powers is None else powers
    unset = (bits.view(torch.uint8).unsqueeze(-1) & powers).eq(0).flatten(1)
    return unset if unset.shape[1] == size else unset[:, :size]


class MaskedDecoder:
    """Another decoder under masks. Masks need the tokens of the last step, so the engine does not run ahead."""

    reads_tokens = True

    def __init__(self, decoder: Decoder, masks: TokenMasks) -> None:
        """Raises `Unsupported` for a decoder that chooses tokens by itself."""
        if not getattr(decoder, "uses_sampler", True):
            name = type(decoder).__qualname__
            raise Unsupported(f"{name} does not draw its tokens through the sampler, so no mask can restrict them")
        self._decoder, self._masks = decoder, masks
        self._sampler: MaskingSampler | None = None
        self.query_lens: tuple[int, ...] = getattr(decoder, "query_lens", (1,))
        #: What comes behind drafts is not known before the step.
        self._without_drafts = self.query_lens == (1,)
        self.reads_hidden: bool = getattr(decoder, "reads_hidden", False)
        self.draft_trees: bool = getattr(decoder, "draft_trees", False)
        self.details: Mapping[str, Any] = {
            "decoder": type(decoder).__qualname__, **getattr(decoder, "details", {})
        }  # fmt: skip

    def prepare(self, request: Request) -> Request:
        inner = getattr(self._decoder, "prepare", None)
        return inner(request) if inner is not None else request

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Any:
        if self._sampler is None or self._sampler.sampler is not sampler:
            self._sampler = MaskingSampler(sampler, self._masks)
        if self._without_drafts:
            self._sampler.begin(plan)
        try:
            return self._decoder.launch(plan, runner, self._sampler)
        finally:
            self._sampler.settle()

    def collect(self, ticket: Any) -> list[Emission]:
        return self._decoder.collect(ticket)

    def counters(self) -> dict[str, float]:
        inner = getattr(self._decoder, "counters", None)
        return inner() if inner is not None else {}

    def reset(self) -> None:
        if hasattr(self._decoder, "reset"):
            self._decoder.reset()

    def forget(self, sequence: Sequence) -> None:
        self._masks.forget(sequence)
        if hasattr(self._decoder, "forget"):
            self._decoder.forget(sequence)
