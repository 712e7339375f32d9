"""Teacher-forced scoring through the same runner, store and parts that generate."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from infermix.errors import OutOfMemory, UserError
from infermix.roles.decoder import Want
from infermix.roles.engine import Score, ScoreRequest
from infermix.roles.request import Request, Sequence
from infermix.roles.scheduler import Plan, Scheduled

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.engine.lanes import Lanes
    from infermix.engine.runner import ModelRunner
    from infermix.roles.kv_space import KVShape, KVSpace

#: Logits of one forward are kept under this many bytes (fp32) by feeding long texts in chunks.
_LOGITS_BYTES = 512 << 20


@dataclass(slots=True, eq=False)
class _Text:
    """One request under way: rows of log-probabilities collected so far, in order."""

    request: ScoreRequest
    sequence: Sequence
    logprobs: list[float] = field(default_factory=list)
    top1: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def take(self, rows: Tensor) -> None:
        """`rows [n, V]`: logits that predict the next n tokens to be scored."""
        start = self.request.first + len(self.logprobs)
        targets = torch.tensor(self.request.token_ids[start : start + len(rows)], device=rows.device)
        distribution = torch.log_softmax(rows.float(), dim=-1)
        self.logprobs += distribution.gather(1, targets[:, None]).squeeze(1).tolist()
        self.top1 += rows.argmax(-1).tolist()
        if self.request.want_logits:
            self.logits.append(rows.float().cpu())

    def result(self) -> Score:
        return Score(self.logprobs, self.top1, torch.cat(self.logits) if self.logits else None)


class Scorer:
    """Scores texts one pass each (`prefill`) or token by token in lockstep (`decode`)."""

    def __init__(self, runner: ModelRunner, space: KVSpace, shape: KVShape, lanes: Lanes) -> None:
        self._runner, self._space, self._shape, self._lanes = runner, space, shape, lanes

    def score(self, requests: Seq[ScoreRequest]) -> list[Score]:
        texts = [self._open(number, request) for number, request in enumerate(requests)]
        for text in texts:
            if text.request.protocol == "prefill":
                self._prefill(text, len(text.request.token_ids) - 1)
                self._close([text])
        stepwise = [text for text in texts if text.request.protocol == "decode"]
        while stepwise:
            stepwise = stepwise[self._decode(stepwise) :]
        return [text.result() for text in texts]

    def _open(self, number: int, request: ScoreRequest) -> _Text:
        if request.protocol not in ("prefill", "decode"):
            raise UserError(f"no scoring protocol is called {request.protocol!r}", hint="known: decode, prefill")
        if not 1 <= request.first < len(request.token_ids):
            raise UserError(
                f"cannot score tokens {request.first} to {len(request.token_ids) - 1}",
                hint="the first scored token needs at least one token before it",
            )
        if len(request.token_ids) > self._shape.max_model_len:
            raise UserError(
                f"a text of {len(request.token_ids)} tokens is to be scored, the engine holds "
                f"{self._shape.max_model_len} per sequence",
                hint="use a shorter window, or raise limits.max_model_len",
            )
        carrier = Request(request_id=f"score-{number}", prompt_ids=request.token_ids)
        return _Text(request, Sequence(-1 - number, carrier, list(request.token_ids), len(request.token_ids)))

    def _reserve(self, text: _Text) -> bool:
        if not self._space.reserve(text.sequence.seq_id, len(text.request.token_ids)):
            return False
        self._lanes.assign([text.sequence])
        return True

    def _prefill(self, text: _Text, stop: int) -> None:
        """Process tokens up to `stop` (exclusive) and collect the rows that predict scored tokens."""
        if text.sequence.lane < 0 and not self._reserve(text):
            raise OutOfMemory(f"the KV layout cannot hold a text of {len(text.request.token_ids)} tokens")
        sequence = text.sequence
        while sequence.num_computed < stop:
            count = stop - sequence.num_computed
            if not self._space.recompute:
                count = min(count, self._chunk())
            first = sequence.num_computed
            rows = self._forward([(sequence, count)])
            skip = max(0, text.request.first - 1 - first)
            if skip < count:
                text.take(rows[skip:])

    def _chunk(self) -> int:
        chunk = max(16, _LOGITS_BYTES // (4 * self._runner.vocab_size))
        return min(chunk, self._shape.max_query_len or chunk)

    def _decode(self, texts: Seq[_Text]) -> int:
        """Run as many of `texts` as fit in lockstep; returns how many were finished."""
        batch: list[_Text] = []
        for text in texts[: self._lanes.count]:
            if not self._reserve(text):
                break
            batch.append(text)
        if not batch:
            raise OutOfMemory(f"the KV layout cannot hold a text of {len(texts[0].request.token_ids)} tokens")
        for text in batch:
            self._prefill(text, text.request.first)
        active = _unfinished(batch)
        while active:
            rows = self._forward([(text.sequence, 1) for text in active])
            for text, row in zip(active, rows.split(1), strict=True):
                text.take(row)
            active = _unfinished(active)
        self._close(batch)
        return len(batch)

    def _forward(self, work: Seq[tuple[Sequence, int]]) -> Tensor:
        plan = Plan([Scheduled(sequence, count) for sequence, count in work])
        logits = self._runner.forward(plan, Want(all_logits=True)).logits
        for sequence, count in work:
            sequence.num_computed += count
        return logits

    def _close(self, texts: Iterable[_Text]) -> None:
        for text in texts:
            self._space.release(text.sequence.seq_id)
            self._lanes.release(text.sequence)


def _unfinished(texts: Iterable[_Text]) -> list[_Text]:
    return [text for text in texts if len(text.logprobs) < len(text.request.token_ids) - text.request.first]
