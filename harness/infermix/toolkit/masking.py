"""Logits masks per request, composed with any decoder: a grammar, a vocabulary, a list of allowed answers.

The decoder that is wrapped sees a sampler whose logits are masked, so greedy and sampled tokens, verification rows
and the distributions of rejection sampling all belong to the constrained target. A draft model draws unmasked: what
the mask forbids has probability 0 at the target and does not stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from infermix.errors import Unsupported, UserError
from infermix.roles.decoder import Decoder, Emission, Forward, Runner, Sampler
from infermix.roles.request import Request, Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.sampling import stop_tokens


class TokenMasks(Protocol):
    """Which tokens may come next.

    Optional: `fill_all(sequences, drafts, bits) -> bool`, `fill` for every row of a step at once, row i for
    `sequences[i]` and `drafts[i]`. It writes all of `bits`, which hold anything before; `False`: no row is limited.
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


class MaskingSampler:
    """A sampler whose forbidden tokens have no probability."""

    def __init__(self, sampler: Sampler, masks: TokenMasks) -> None:
        self.sampler, self._masks = sampler, masks
        self._fill = getattr(masks, "fill_all", self._fill_rows)
        #: Kept on the device: a step should not launch what is the same in every one.
        self._powers: Tensor | None = None

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
        bits = torch.empty(
            len(forward.sequences), -(-size // 32), dtype=torch.int32, pin_memory=logits.device.type == "cuda"
        )
        if not self._fill(forward.sequences, drafts, bits):
            return forward
        for row, (seq, own) in enumerate(zip(forward.sequences, drafts, strict=True)):
            if not own and seq.request.sampling.min_new_tokens:
                self._refuse_dead_end(seq, bits[row : row + 1], size)
        masked = logits.masked_fill(self._forbidden(bits.to(logits.device, non_blocking=True), size), float("-inf"))
        return replace(forward, logits=masked, most_likely=None)

    def _forbidden(self, bits: Tensor, size: int) -> Tensor:
        if self._powers is None:
            self._powers = powers_of_two(bits.device)
        return forbidden(bits, size, self._powers)

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
        return self._decoder.launch(plan, runner, self._sampler)

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
