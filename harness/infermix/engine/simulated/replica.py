"""One simulated engine: the real scheduler and KV space, steps that take the time that a model says.

Between two events a plan that stays valid is not asked for again: `Run` covers all of its steps. An arrival cuts it
at the end of the step that it falls into, which is when a real engine would look at its queue again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infermix.cost.flops import attended_pairs
from infermix.cost.step_model import StepWork
from infermix.engine.kv_counters import KVCounters
from infermix.errors import InfermixError
from infermix.record.gaps import bin_of
from infermix.roles.request import FinishReason, Sequence, TokenEvent

if TYPE_CHECKING:
    from infermix.record.gaps import GapCounter
    from infermix.roles.kv_space import KVSpace
    from infermix.roles.request import Request
    from infermix.roles.scheduler import Plan, Scheduler

#: Seconds of a step.
TimeOf = Callable[[StepWork], float]
#: A run ends after so many steps at the latest.
MOST_STEPS = 1 << 20


@dataclass(slots=True, eq=False)
class SimulatedSequence(Sequence):
    """Outputs count as in flight for ever: `tokens` is the request's own prompt, shared and never changed.

    `last_ns` is when its last output token came, -1 before the first; `told` counts outputs that events told of.
    """

    last_ns: int = -1
    told: int = 0


@dataclass(slots=True)
class Run:
    """`num_steps` equal plans of `new_tokens` from `start_ns` on; step i (from 0) takes `first_s + i slope_s`."""

    plan: Plan
    start_ns: int
    num_steps: int
    first_s: float
    slope_s: float
    new_tokens: int

    def end_ns(self, steps: int) -> int:
        """When so many of its steps are over."""
        return self.start_ns + round(1e9 * (steps * self.first_s + self.slope_s * steps * (steps - 1) / 2))

    def cut(self, time_ns: int) -> None:
        """End with the step that is under way at `time_ns`."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.end_ns(middle) >= time_ns else (middle + 1, high)
        self.num_steps = low


class Replica:
    """Times are nanoseconds of the virtual clock. `each_token` returns an event per token, else first and last.

    Without `jump` the scheduler is asked at every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        space: KVSpace,
        time_of: TimeOf,
        gaps: GapCounter,
        *,
        each_token: bool = False,
        jump: bool = True,
    ) -> None:
        self._scheduler, self._space, self._time_of, self._gaps = scheduler, space, time_of, gaps
        self._each_token, self._jump = each_token, jump
        self._observe = getattr(scheduler, "observe", None)
        self._register = getattr(space, "register", None)
        self._kv = KVCounters(space)
        self._live: dict[int, SimulatedSequence] = {}
        self._next_id = 0
        self._run: Run | None = None
        self._wake_ns: int | None = None
        self.counts = dict.fromkeys(("steps", "schedules", "preemptions", "computed_tokens"), 0.0)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def next_ns(self) -> int | None:
        """When something happens next if nothing arrives; `None` when idle, or when it has to be started."""
        return self._run.end_ns(self._run.num_steps) if self._run is not None else self._wake_ns

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def counters(self) -> dict[str, float]:
        prefixes = {name: value for name, value in self._kv.counters().items() if not name.endswith("_sum")}
        return {**self.counts, **prefixes, **getattr(self._scheduler, "counters", dict)()}

    def add(self, request: Request, now_ns: int) -> None:
        """Queue a request; what runs stops at the end of its step."""
        sequence = SimulatedSequence(self._next_id, request, request.prompt_ids, len(request.prompt_ids))  # type: ignore[arg-type]
        self._next_id += 1
        self._live[sequence.seq_id] = sequence
        self._scheduler.add(sequence)
        self._wake_ns = None
        if self._run is not None:
            self._run.cut(now_ns)

    def start(self, now_ns: int) -> None:
        """Ask for the next plan; afterwards `next_ns` says when it is over, or when to ask again."""
        plan = self._scheduler.schedule(self._space, now_ns / 1e9)
        self.counts["schedules"] += 1
        self._run, self._wake_ns = None, None
        if plan.wake_s is not None:
            self._wake_ns = max(now_ns + 1, round(plan.wake_s * 1e9))
            return
        for sequence in (*plan.preempted, *plan.swapped_out):
            sequence.num_preemptions += 1
            sequence.lane = -1
            self._kv.end(sequence)
        self.counts["preemptions"] += len(plan.preempted) + len(plan.swapped_out)
        take_copies = getattr(self._space, "take_copies", None)
        if take_copies is not None:
            take_copies()
        if not plan.entries:
            if not (plan.preempted or plan.moves) and self._live:
                raise InfermixError(
                    f"the scheduler runs nothing although {self._scheduler.num_waiting} wait; "
                    f"KV {self._space.usage()}"
                )
            self._wake_ns = now_ns
            return
        self._run = self._begin(plan, now_ns)

    def _begin(self, plan: Plan, now_ns: int) -> Run:
        if self._register is not None:
            self._count_hits(plan)
        context = more = pairs = 0
        for entry in plan.entries:
            context += entry.sequence.num_computed
            if entry.num_new_tokens > 1:
                more += entry.num_new_tokens - 1
                pairs += attended_pairs(entry.num_new_tokens, entry.sequence.num_computed + entry.num_new_tokens)
        count = len(plan.entries)
        context += count + more
        steps = self._steps(plan) if self._jump and plan.valid_steps > 1 else 1
        first_s = self._time_of(StepWork(count, count + more, context, pairs))
        slope_s = 0.0
        if steps > 1:
            last_s = self._time_of(StepWork(count, count, context + count * (steps - 1), 0))
            slope_s = (last_s - first_s) / (steps - 1)
        return Run(plan, now_ns, steps, first_s, slope_s, count + more)

    def _count_hits(self, plan: Plan) -> None:
        for entry in plan.entries:
            if entry.sequence.lane < 0:
                entry.sequence.lane = 0
                self._kv.begin(entry.sequence)

    @staticmethod
    def _steps(plan: Plan) -> int:
        """Until the first sequence of a plan that stays valid has its last token."""
        left = min(seq.max_tokens - len(seq.tokens) - seq.num_inflight for seq in (e.sequence for e in plan.entries))
        return min(plan.valid_steps, left, MOST_STEPS)

    def finish(self) -> list[TokenEvent]:
        """The run is over: hand out its tokens, let go of what ended."""
        run, self._run = self._run, None
        assert run is not None, "nothing runs"
        events: list[TokenEvent] = []
        self.counts["steps"] += run.num_steps
        self.counts["computed_tokens"] += run.new_tokens * run.num_steps
        if self._each_token:
            self._advance_by_one(run, events)
        else:
            self._advance(run, run.num_steps, run.start_ns, events)
        if self._observe is not None:
            for step in range(run.num_steps):
                self._observe(run.first_s + step * run.slope_s, run.plan)
        return events

    def _advance_by_one(self, run: Run, events: list[TokenEvent]) -> None:
        for step in range(run.num_steps):
            one = Run(run.plan, run.end_ns(step), 1, run.first_s + step * run.slope_s, 0.0, run.new_tokens)
            self._advance(one, 1, one.start_ns, events, end_ns=run.end_ns(step + 1), ahead=step > 0)

    def _advance(
        self,
        run: Run,
        steps: int,
        start_ns: int,
        events: list[TokenEvent],
        end_ns: int | None = None,
        ahead: bool = False,
    ) -> None:
        """The inner loop of a simulation: what every sequence of the plan gained.

        Only the KV of a plan's first step is reserved by the scheduler; `ahead` says that this is a later one.
        """
        end_ns = run.end_ns(steps) if end_ns is None else end_ns
        first_ns = run.end_ns(1) if steps > 1 else end_ns
        reserve = self._space.reserve if steps > 1 or ahead else None
        register, even, fresh = self._register, 0, 0
        for entry in run.plan.entries:
            seq: SimulatedSequence = entry.sequence  # type: ignore[assignment]
            new = entry.num_new_tokens
            inflight = seq.num_inflight
            known = seq.num_prompt_tokens + inflight
            computed = seq.num_computed = seq.num_computed + (steps if new == 1 else new)
            if register is not None and new > 1:
                register(seq.seq_id, seq.tokens, computed, seq.request.cache_salt, False)
            if computed < known:
                continue  # a piece of a prompt
            seq.num_inflight = inflight + steps
            if reserve is not None and not reserve(seq.seq_id, computed):
                raise InfermixError(f"a plan for {steps} steps did not have the KV of {seq.request.request_id!r}")
            last_ns = seq.last_ns
            seq.last_ns = end_ns
            if last_ns == start_ns:
                even += 1
            else:
                fresh += 1
                if last_ns >= 0:  # it was left out of the steps before
                    self._gaps.add((first_ns - last_ns) / 1e9)
            if last_ns < 0 or known + steps >= seq.max_tokens or self._each_token:
                self._tell(seq, last_ns, first_ns, end_ns, events)
        if steps == 1:
            self._gaps.add((end_ns - start_ns) / 1e9, even)
        else:
            self._gaps.add(run.first_s, even)
            self._add_gaps(run, even + fresh)

    def _add_gaps(self, run: Run, count: int) -> None:
        """Gaps of all steps but the first; in one go where they are practically equal."""
        last_s, more = run.first_s + (run.num_steps - 1) * run.slope_s, run.num_steps - 1
        if bin_of(run.first_s) == bin_of(last_s):
            self._gaps.add((run.first_s + run.slope_s + last_s) / 2, count * more)
            return
        for step in range(1, run.num_steps):
            self._gaps.add(run.first_s + step * run.slope_s, count)

    def _tell(
        self, seq: SimulatedSequence, last_ns: int, first_ns: int, end_ns: int, events: list[TokenEvent]
    ) -> None:
        """Events of a sequence that got its first tokens, or ended; the tokens in between come with the last."""
        done = len(seq.tokens) + seq.num_inflight >= seq.max_tokens
        if last_ns < 0:
            seq.told = 1
            ends_at_once = done and seq.num_inflight == 1
            events.append(self._event(seq, 1, first_ns, ends_at_once))
        if seq.num_inflight > seq.told and (done or self._each_token):
            events.append(self._event(seq, seq.num_inflight - seq.told, end_ns, done))
            seq.told = seq.num_inflight
        if done:
            self._retire(seq)

    @staticmethod
    def _event(seq: SimulatedSequence, count: int, time_ns: int, ends: bool) -> TokenEvent:
        return TokenEvent(seq.request.request_id, (0,) * count, time_ns, FinishReason.LENGTH if ends else None)

    def _retire(self, seq: SimulatedSequence) -> None:
        seq.finish_reason = FinishReason.LENGTH
        if self._register is not None:
            # Outputs are nobody's prompt: numbers that no other sequence has stand for them.
            outputs = [(1 << 31) + (seq.seq_id * 8191 + place) % (1 << 31) for place in range(seq.num_inflight)]
            self._register(seq.seq_id, [*seq.tokens, *outputs], seq.num_computed, seq.request.cache_salt, True)
        self._scheduler.finish(seq)
        self._space.release(seq.seq_id)
        self._kv.end(seq)
        del self._live[seq.seq_id]
