"""The native engine: schedule, launch, collect, commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

from infermix.engine.forks import requests_of_outputs, share_kv
from infermix.engine.kept_paths import KeptPaths
from infermix.engine.kv_counters import KVCounters
from infermix.engine.misfit import refuse_misfit
from infermix.engine.scoring import Scorer
from infermix.engine.step_log import StepLog
from infermix.engine.step_times import StepTimes
from infermix.engine.warm import num_compiles
from infermix.errors import InfermixError, Unsupported, UserError
from infermix.roles.request import FinishReason, Request, Sequence, TokenEvent
from infermix.toolkit.admission import give_back
from infermix.toolkit.sampling import stop_tokens

if TYPE_CHECKING:
    from infermix.engine.bridge import Joint
    from infermix.engine.lanes import Lanes
    from infermix.engine.runner import ModelRunner
    from infermix.roles.decoder import Decoder, Emission
    from infermix.roles.engine import EngineContext, EngineReport, Score, ScoreRequest, Tokenizer
    from infermix.roles.kv_space import KVShape, KVSpace
    from infermix.roles.kv_store import KVStore
    from infermix.roles.scheduler import Plan, Scheduler
    from infermix.toolkit.block_swapper import BlockSwapper
    from infermix.toolkit.sampling import TokenSampler


class NativeEngine:
    """Drives the five parts. With `lag` 1 the host reads a step's tokens while the next one runs, with 0 at once."""

    def __init__(
        self,
        *,
        context: EngineContext,
        report: EngineReport,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        joint: Joint,
        runner: ModelRunner,
        sampler: TokenSampler,
        space: KVSpace,
        store: KVStore,
        shape: KVShape,
        scheduler: Scheduler,
        decoder: Decoder,
        lanes: Lanes,
        lag: int = 0,
        swapper: BlockSwapper | None = None,
        log: StepLog | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._context, self._report = context, report
        self._eos_token_ids = eos_token_ids
        self._joint, self._runner, self._sampler = joint, runner, sampler
        self._space, self._store, self._shape = space, store, shape
        self._scheduler, self._decoder, self._lanes = scheduler, decoder, lanes
        self._lag, self._swapper = lag, swapper
        self._kv = KVCounters(space)
        self._paths = KeptPaths(space, store, shape)
        self._register = getattr(space, "register", None)
        self._forked: list[Sequence] = []
        self._adopted: list[Sequence] = []
        self.space, self.store, self.shape = space, store, shape
        #: Told of every sequence that ended while its KV is still there.
        self.before_release: Callable[[Sequence, FinishReason], None] | None = None
        self._siblings: dict[int, list[Sequence]] = {}
        self._prepare: Callable[[Request], Request] = getattr(decoder, "prepare", lambda request: request)
        self._searches = bool(getattr(decoder, "returns_outputs", False))
        self._pending: deque[Any] = deque()
        self._step_times = StepTimes(scheduler, context.clock_ns, log)
        self._live: dict[int, Sequence] = {}
        self._next_id = 0
        self._counters: dict[str, float] = {}
        self.reset()

    def submit(self, request: Request) -> None:
        self.refuse_misfit(request)
        self._add(self._first_sequence(self._prepare(request)))

    @torch.inference_mode()
    def fork(self, request_id: str, request: Request) -> None:
        """Submit a request that begins with the KV of a running one, as far as their tokens agree.

        Parallel samples and beams do so with a prompt that repeats the other's tokens. What is not shared, for want
        of memory or because the request is not let in at the next step, is computed. Raises `UserError` like
        `submit`, and for an unknown `request_id`.
        """
        self.refuse_misfit(request)
        parent = next((seq for seq in self._live.values() if seq.request.request_id == request_id), None)
        if parent is None:
            raise UserError(f"request {request_id!r} is not running, so nothing can be forked from it")
        child = self._first_sequence(self._prepare(request))
        share_kv(parent, child, self._space, self._store, self._shape)
        if child.num_computed:
            self._forked.append(child)
        self._add(child)

    def adopt(self, request: Request, tokens: tuple[int, ...], fill: Callable[[int], bool]) -> bool:
        """Enter a request whose prompt was computed elsewhere and whose first output is `tokens`.

        `fill(seq_id)` reserves and writes the prompt's KV; where it has no room, `False` comes back and nothing has
        changed. A request that is not let in at the next step gives its KV back and computes it again.
        """
        sequence = self._new_sequence(request)
        if len(self._live) >= self._lanes.count or not fill(sequence.seq_id):
            return False
        sequence.tokens.extend(tokens)
        sequence.num_computed = sequence.num_prompt_tokens
        self._adopted.append(sequence)
        self._add(sequence)
        return True

    @property
    def model(self) -> Any:
        """The module that is driven; with `close` it gets its own attention back."""
        return self._joint.model

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        self._step_times.begin()
        plan = self._scheduler.schedule(self._space, self._context.clock_ns() / 1e9)
        waits = plan.wake_s is not None  # a poll, which would only dilute what is counted per step
        if not waits:
            self._note_plan(plan)
        for sequence in (*plan.preempted, *plan.swapped_out):
            self._forget_device_state(sequence)
            sequence.num_preemptions += 1
        self._move_blocks(plan)
        returned = self._settle_forks(plan)
        if plan.entries:
            self._launch(plan)
        if waits:
            self._step_times.idle()
        else:
            self._kv.sample()
        if not self._pending:
            return [] if returned else self._refuse_stall(plan)
        if len(self._pending) <= self._lag and plan.entries:
            return []
        emissions = self._decoder.collect(self._pending.popleft())
        self._step_times.collected()
        return self._commit(emissions)

    @torch.inference_mode()
    def score(self, requests: Seq[ScoreRequest]) -> list[Score]:
        if self.has_work:
            raise InfermixError("score needs an idle engine: requests are still running")
        if not self._joint.causal:
            raise Unsupported("a model that sees what is behind a token gives no probability of the next one")
        return Scorer(self._runner, self._space, self._shape, self._lanes).score(requests)

    def step_log(self) -> list[tuple[int, int, int, int, float]] | None:
        return self._step_times.rows

    def report(self) -> EngineReport:
        self._report.counters = {
            **self._counters,
            **self._kv.counters(),
            **(self._swapper.counters() if self._swapper else {}),
            **getattr(self._decoder, "counters", dict)(),
            **getattr(self._scheduler, "counters", dict)(),
            **self._runner.counters(),
            "compiles": float(num_compiles()),
        }
        return self._report

    def reset(self) -> None:
        for sequence in list(self._live.values()):
            self._retire(sequence, FinishReason.ABORT)
        self._forked.clear()
        self._siblings.clear()
        while self._pending:
            self._decoder.collect(self._pending.popleft())
        self._step_times.reset()
        self._sampler.reset()
        if self._swapper is not None:
            self._swapper.reset()
        for part in (self._decoder, self._scheduler):
            if hasattr(part, "reset"):
                part.reset()
        if hasattr(self._space, "reset_prefixes"):
            self._space.reset_prefixes()
        self._kv.reset()
        self._runner.reset_counters()
        names = ("steps", "preemptions", "computed_tokens", "discarded_tokens", "forked_tokens")
        self._counters = dict.fromkeys(names, 0.0)

    def close(self) -> None:
        self.reset()
        self._runner.graphs = self._runner.mixed = None
        self._joint.detach()
        if self._context.machine.device == "cuda":
            torch.cuda.synchronize()

    def refuse_misfit(self, request: Request) -> None:
        """Raises `UserError` for a request that this engine can never serve."""
        refuse_misfit(request, self._context, self._space, self._shape)
        sampling = request.sampling
        if sampling.num_outputs > 1 and sampling.temperature == 0 and not self._searches:
            raise UserError(
                f"request {request.request_id!r} wants {sampling.num_outputs} greedy outputs, which would be equal",
                hint="a temperature above 0, or a decoder that searches (beam)",
            )

    def _new_sequence(self, request: Request, output: int = 0) -> Sequence:
        prompt = list(request.prompt_ids)
        sequence = Sequence(self._next_id, request, prompt, len(prompt), output=output)
        self._next_id += 1
        return sequence

    def _first_sequence(self, request: Request) -> Sequence:
        """The sequence of a request's first output; the others wait until its prompt is computed."""
        first = self._new_sequence(request)
        if request.sampling.num_outputs > 1 and not self._searches:
            others = enumerate(requests_of_outputs(request), 1)
            self._siblings[first.seq_id] = [self._new_sequence(other, output) for output, other in others]
        return first

    def _add(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._live[sequence.seq_id] = sequence

    def _settle_forks(self, plan: Plan) -> bool:
        """Forks that were not let in at once must not hold blocks that those who run may need.

        Returns whether any were given back: the next step then has room that this one did not have.
        """
        if not self._forked and not self._adopted:
            return False
        running = {entry.sequence.seq_id for entry in plan.entries}
        left_out = [child for child in (*self._forked, *self._adopted) if child.seq_id not in running]
        for child in left_out:
            give_back(child, self._space)
        self._counters["forked_tokens"] += sum(child.num_computed for child in self._forked)
        self._forked.clear()
        self._adopted.clear()
        return bool(left_out)

    def _split(self, sequence: Sequence) -> None:
        """Once a prompt is computed, the request's further outputs begin with its KV."""
        if sequence.seq_id in self._siblings and sequence.num_computed >= sequence.num_prompt_tokens:
            for child in self._siblings.pop(sequence.seq_id):
                share_kv(sequence, child, self._space, self._store, self._shape)
                if child.num_computed:
                    self._forked.append(child)
                self._add(child)

    def _launch(self, plan: Plan) -> None:
        for entry in plan.entries:
            if entry.sequence.lane < 0:
                self._kv.begin(entry.sequence)
        self._lanes.assign(entry.sequence for entry in plan.entries)
        self._step_times.launched(plan)
        self._pending.append(self._decoder.launch(plan, self._runner, self._sampler))
        for entry in plan.entries:
            sequence = entry.sequence
            finished_prompt = entry.num_new_tokens == sequence.num_uncomputed
            sequence.num_computed += entry.num_new_tokens
            sequence.num_inflight += finished_prompt
            if self._register is not None:
                self._publish(sequence)
            if self._siblings:
                self._split(sequence)

    def _publish(self, sequence: Sequence, last: bool = False) -> None:
        """Offer what was computed to later requests; device order makes their launches read it as it is now."""
        assert self._register is not None
        salt = sequence.request.cache_salt
        self._register(sequence.seq_id, sequence.tokens, sequence.num_computed, salt, last)

    def _move_blocks(self, plan: Plan) -> None:
        """Queue what changes blocks before the step, and let the step wait for what it reads.

        What leaves goes first, since copies may be written where it was; what comes back goes last, since it may be
        written where copies are read.
        """
        swapper, num_out = self._swapper, len(plan.swapped_out)
        if swapper is not None and num_out:
            swapper.execute(plan.moves[:num_out])
        self._runner.copy_blocks()
        if swapper is not None:
            if plan.swapped_in:
                swapper.execute(plan.moves[num_out:])
            swapper.wait_for(entry.sequence.seq_id for entry in plan.entries)

    def _refuse_stall(self, plan: Plan) -> list[TokenEvent]:
        if self._live and not plan.preempted and not plan.moves and plan.wake_s is None:
            raise InfermixError(
                f"the scheduler runs nothing although {self._scheduler.num_waiting} wait and "
                f"{self._scheduler.num_running} run; KV {self._space.usage()}"
            )
        return []

    def _commit(self, emissions: list[Emission]) -> list[TokenEvent]:
        now = self._context.clock_ns()
        events = []
        for emission in emissions:
            event = self._commit_one(emission, now)
            if event is not None:
                events.append(event)
                events += self._alternatives(emission, now)
        self._paths.move()
        return events

    def _alternatives(self, emission: Emission, now: int) -> Iterator[TokenEvent]:
        request = emission.sequence.request
        stops = stop_tokens(request.sampling, self._eos_token_ids)
        for output, tokens in enumerate(emission.alternatives, 1):
            reason = FinishReason.STOP if tokens[-1] in stops else FinishReason.LENGTH
            yield TokenEvent(request.request_id, tokens, now, reason, output)

    def _commit_one(self, emission: Emission, now: int) -> TokenEvent | None:
        sequence = emission.sequence
        sequence.num_inflight = max(0, sequence.num_inflight - 1)
        if sequence.finish_reason is not None:
            self._counters["discarded_tokens"] += len(emission.token_ids)
            return None
        kept = []
        for token in emission.token_ids:
            sequence.tokens.append(token)
            kept.append(token)
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                self._retire(sequence, reason)
                break
        if emission.num_drafts and sequence.finish_reason is None:
            # The launch counted the sequence's own tokens; of the drafts behind them only the accepted ones stay.
            # Where none came, its last own token is processed again.
            sequence.num_computed += len(kept) - 1
            self._paths.book(sequence, emission.path[: len(kept) - 1])
            self._space.truncate(sequence.seq_id, sequence.num_computed)
        if not kept:
            return None
        reason, request_id = sequence.finish_reason, sequence.request.request_id
        return TokenEvent(request_id, tuple(kept), now, reason, sequence.output)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        if num_output >= sampling.min_new_tokens and (
            token in stop_tokens(sampling, self._eos_token_ids) or self._hits_stop_string(sequence)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= sampling.max_new_tokens else None

    def _hits_stop_string(self, sequence: Sequence) -> bool:
        stops = sequence.request.sampling.stop
        if not stops:
            return False
        if self.tokenizer is None:
            raise UserError("stop strings need a tokenizer", hint="use stop_token_ids with dummy weights")
        # Every token holds at least one byte: a stop string of n bytes spans at most n tokens. Four more begin the
        # text before it, so that the first token is no half character.
        tail = max(len(stop.encode()) for stop in stops) + 4
        output = sequence.tokens[sequence.num_prompt_tokens :]
        text = self.tokenizer.decode(output[-tail:])
        return any(stop in text for stop in stops)

    def _retire(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if self._register is not None and reason is not FinishReason.ABORT:
            self._publish(sequence, last=True)
        if self.before_release is not None and reason is not FinishReason.ABORT:
            self.before_release(sequence, reason)
        self._scheduler.finish(sequence)
        self._space.release(sequence.seq_id)
        self._forget_device_state(sequence)
        del self._live[sequence.seq_id]
        if not self._live:
            self._step_times.idle()

    def _forget_device_state(self, sequence: Sequence) -> None:
        self._kv.end(sequence)
        if hasattr(self._decoder, "forget"):
            self._decoder.forget(sequence)
        if sequence.lane >= 0:
            self._sampler.forget(sequence.lane)
        self._lanes.release(sequence)
        if self._swapper is not None:
            self._swapper.wait_for((sequence.seq_id,))

    def _note_plan(self, plan: Plan) -> None:
        self._counters["steps"] += 1
        self._counters["preemptions"] += len(plan.preempted) + len(plan.swapped_out)
        self._counters["computed_tokens"] += plan.num_new_tokens
