"""Autoregressive decoding: one forward, one token per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from infermix.roles.decoder import Emission, Forward, Runner, Sampler

if TYPE_CHECKING:
    from infermix.roles.request import Sequence
    from infermix.roles.scheduler import Plan
    from torch import Tensor


@dataclass(slots=True)
class Ticket:
    """A launched step: its sampled ids on their way to the host; `ready` is `None` when they are there already."""

    sequences: list[Sequence]
    ids: Tensor
    ready: torch.cuda.Event | None


class AutoregressiveDecoder:
    """The baseline of every decoding strategy; lossless by definition."""

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Ticket:
        forward = runner.forward(plan)
        if not forward.sequences:
            return Ticket([], torch.empty(0, dtype=torch.int64), None)
        return self._to_host(forward, sampler.sample(forward))

    def collect(self, ticket: Ticket) -> list[Emission]:
        if ticket.ready is not None:
            ticket.ready.synchronize()
        return [Emission(seq, (token,)) for seq, token in zip(ticket.sequences, ticket.ids.tolist(), strict=True)]

    def _to_host(self, forward: Forward, ids: Tensor) -> Ticket:
        if not ids.is_cuda:
            return Ticket(forward.sequences, ids, None)
        host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        host.copy_(ids, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Ticket(forward.sequences, host, ready)
