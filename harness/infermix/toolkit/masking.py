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

import torch
from torch import Tensor

from infermix.errors import Unsupported, UserError
from infermix.roles.decoder import Decoder, Emission, Forward, Runner, Sampler
from infermix.roles.request import Request, Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.sampling import stop_tokens


class TokenMasks(Protocol):
    """Which tokens may come next."""

    def allowed(self, sequence: Sequence, drafts: tuple[int, ...]) -> Tensor | None:
        """Bool `[V]` on the CPU behind `sequence.tokens` and `drafts`; `None`: any, also behind a forbidden draft."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended or starts over."""
        ...


class MaskingSampler:
    """A sampler whose forbidden tokens have no probability."""

    def __init__(self, sampler: Sampler, masks: TokenMasks) -> None:
        self._sampler, self._masks = sampler, masks

    def sample(self, forward: Forward) -> Tensor:
        return self._sampler.sample(self._masked(forward, [()] * len(forward.sequences)))

    def sample_rows(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        return self._sampler.sample_rows(self._masked(forward, drafts), drafts)

    def probabilities(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        return self._sampler.probabilities(self._masked(forward, drafts), drafts)

    def accept(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        self._sampler.accept(sequence, token_ids)

    def _masked(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Forward:
        found = [self._masks.allowed(seq, own) for seq, own in zip(forward.sequences, drafts, strict=True)]
        for seq, own, mask in zip(forward.sequences, drafts, found, strict=True):
            if mask is not None and not own and seq.request.sampling.min_new_tokens:
                self._refuse_dead_end(seq, mask)
        if all(mask is None for mask in found):
            return forward
        size = forward.logits.shape[-1]
        rows = [torch.ones(size, dtype=torch.bool) if mask is None else mask for mask in found]
        allowed = torch.stack(rows).to(forward.logits.device, non_blocking=True)
        return replace(forward, logits=forward.logits.masked_fill(~allowed, float("-inf")), most_likely=None)

    def _refuse_dead_end(self, sequence: Sequence, mask: Tensor) -> None:
        """Raises `UserError` where a mask allows stop tokens alone and it is too early for them."""
        request, made = sequence.request, len(sequence.tokens) - sequence.num_prompt_tokens
        stops = stop_tokens(request.sampling, getattr(self._sampler, "eos_token_ids", ()))
        if made < request.sampling.min_new_tokens and stops.issuperset(mask.nonzero().flatten().tolist()):
            raise UserError(
                f"request {request.request_id!r} has to have {request.sampling.min_new_tokens} tokens at least, but "
                f"what constrains it ends behind {made}",
                hint="lower min_new_tokens, or allow longer outputs",
            )


class MaskedDecoder:
    """Another decoder under masks. Masks need the tokens of the last step, so the engine does not run ahead."""

    reads_tokens = True

    def __init__(self, decoder: Decoder, masks: TokenMasks) -> None:
        """Raises `Unsupported` for a decoder that chooses tokens by itself."""
        if not getattr(decoder, "uses_sampler", True):
            name = type(decoder).__qualname__
            raise Unsupported(f"{name} does not draw its tokens through the sampler, so no mask can restrict them")
        self._decoder, self._masks = decoder, masks
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
        return self._decoder.launch(plan, runner, MaskingSampler(sampler, self._masks))

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
