"""`engine: disaggregated`: outputs here, prompts in another process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Any

from infermix.errors import UserError
from infermix.roles.engine import EngineReport, Score, ScoreRequest
from infermix.roles.request import FinishReason, Request, TokenEvent
from infermix.toolkit.handover import KVParcel

from infermix_disaggregated.messages import Computed
from infermix_disaggregated.prefiller import Prefiller
from infermix_disaggregated.transfer import discard, place, receive

#: How long an idle step waits for the other process.
_WAIT_S = 0.002
#: Counters of which the record gives the sum of both workers: prefixes are looked up where prompts are computed.
_OF_BOTH = (
    "prefix_queries", "prefix_queried_tokens", "prefix_hits", "prefix_hit_tokens", "prefix_kept_tokens",
    "resumed_hit_tokens", "prefix_evicted_blocks", "kv_copied_blocks", "preemptions",
)  # fmt: skip


class DisaggregatedEngine:
    """A prompt is computed by the prefill worker; with its first token its KV comes here, and decoding goes on.

    KV that finds no room here waits where it lies. The first token is reported when it arrives. The tokens are those
    of one engine: draws depend on seed and position alone. Counters are those of this process, the other one's are
    called `prefill_NAME`; what a prefix cache found, and preemptions, are of both together.
    """

    def __init__(
        self, decode: Any, prefill: Prefiller, report: EngineReport, layout: str, clock_ns: Callable[[], int],
        way: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.tokenizer = decode.tokenizer
        self._decode, self._prefill, self._report, self._layout = decode, prefill, report, layout
        self._clock_ns, self._way = clock_ns, way
        self._asked: dict[str, Request] = {}
        self._arrived: deque[Computed] = deque()
        #: That of the first one that arrived, once it was taken out of shared memory.
        self._parcel: KVParcel | None = None
        self._zero()

    def _zero(self) -> None:
        names = ("handovers", "handover_bytes", "handover_export_s", "handover_import_s", "handover_waits")
        self._counters = dict.fromkeys(names, 0.0)
        self._of_prompts: dict[str, float] = {}

    def submit(self, request: Request) -> None:
        if request.sampling.num_outputs > 1:
            raise UserError(f"request {request.request_id!r} wants several outputs, which are not handed over")
        self._decode.refuse_misfit(request)
        self._asked[request.request_id] = request
        self._prefill.submit(request)

    @property
    def has_work(self) -> bool:
        return bool(self._asked or self._arrived) or self._decode.has_work

    def step(self) -> list[TokenEvent]:
        busy = self._decode.has_work or bool(self._arrived)
        events = []
        for reply in self._prefill.computed(0.0 if busy else _WAIT_S) if self._asked else ():
            events.append(self._first(reply))
        self._let_in()
        if self._decode.has_work:
            events += self._decode.step()
        return events

    def _first(self, reply: Computed) -> TokenEvent:
        self._of_prompts = reply.counters or self._of_prompts
        reason = FinishReason.STOP if reply.stopped else None
        if not reply.stopped and reply.parcel is None:
            reason = FinishReason.LENGTH
        if reply.parcel is not None:
            self._arrived.append(reply)
        else:
            del self._asked[reply.request_id]
        return TokenEvent(reply.request_id, (reply.token,), self._clock_ns(), reason)

    def _let_in(self) -> None:
        """In order of arrival, while there is room; a parcel that finds none waits in this process."""
        while self._arrived:
            reply, request = self._arrived[0], self._asked[self._arrived[0].request_id]
            begin = self._clock_ns()
            assert reply.parcel is not None
            parcel = self._parcel = self._parcel or receive(reply.parcel)
            if not self._decode.adopt(request, (reply.token,), self._place):
                self._counters["handover_waits"] += 1
                return
            self._parcel = None
            self._arrived.popleft()
            del self._asked[reply.request_id]
            self._counters["handovers"] += 1
            self._counters["handover_bytes"] += parcel.num_bytes
            self._counters["handover_export_s"] += reply.export_s
            self._counters["handover_import_s"] += (self._clock_ns() - begin) / 1e9

    def _place(self, seq_id: int) -> bool:
        engine, parcel = self._decode, self._parcel
        assert parcel is not None
        return place(engine.store, engine.space, engine.shape, self._layout, parcel, seq_id)

    def score(self, requests: Many[ScoreRequest]) -> list[Score]:
        scores: list[Score] = self._decode.score(requests)
        return scores

    def report(self) -> EngineReport:
        counters = {**self._decode.report().counters, **self._counters}
        for name, value in self._of_prompts.items():
            counters[f"prefill_{name}"] = value
            if name in _OF_BOTH:
                counters[name] = counters.get(name, 0.0) + value
        self._report.counters = counters
        self._report.executed["engine"]["handover"] = {**self._way, "workers": 2}
        return self._report

    def reset(self) -> None:
        self._prefill.drop()
        for reply in list(self._arrived)[self._parcel is not None :]:
            discard(reply)
        self._parcel = None
        self._arrived.clear()
        self._asked.clear()
        self._decode.reset()
        self._zero()

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()
