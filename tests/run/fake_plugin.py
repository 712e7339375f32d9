"""An engine, a workload and an evaluator without a model, whose engine fails on request."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from infermix.errors import OutOfMemory, Unsupported, UserError
from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Options, Role
from infermix.roles.engine import Engine, EngineContext, EngineReport, Score, ScoreRequest
from infermix.roles.evaluator import EvaluatorContext, Quality
from infermix.roles.request import FinishReason, Request, SamplingParams, TokenEvent
from infermix.roles.workload import WorkloadOptions
from msgspec import Meta

Fault = Literal[
    "none", "crash", "kill", "exit", "hang", "raise", "memory", "torch_memory", "unsupported", "user", "garbage"
]


class FakeOptions(Options, frozen=True, kw_only=True):
    fault: Fault = "none"
    during: Literal["build", "repeat", "close"] = "repeat"
    output: Literal["varied", "same", "empty"] = "varied"
    delay_s: Annotated[float, Meta(ge=0)] = 0.0
    passes: bool = True
    perplexity: float = 10.0
    journal: str = ""
    letter: str = "A"
    self_check: bool = True


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    time.sleep(600)


def _raise(error: BaseException) -> None:
    raise error


FAULTS: dict[str, Any] = {
    "none": lambda: None,
    "crash": _crash,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
    "hang": _hang,
    "raise": lambda: _raise(ValueError("the flux capacitor is empty")),
    "memory": lambda: _raise(OutOfMemory("4 GB asked, 1 GB there")),
    "torch_memory": lambda: _raise(OutOfMemoryError("CUDA out of memory")),
    "unsupported": lambda: _raise(Unsupported("no soft caps here")),
    "user": lambda: _raise(UserError("the prompt is too long", key="workload.path")),
    "garbage": lambda: os.write(1, b'{"type": "done"}\nnot json \xff\n{"half": '),
}


class FakeEngine:
    """Emits one token per running request and step."""

    tokenizer = None

    def __init__(self, options: FakeOptions, context: EngineContext) -> None:
        self.options, self._context = options, context
        self._running: deque[tuple[Request, list[int]]] = deque()
        self._steps = 0.0
        print("fake engine on stdout")
        print("fake engine on stderr", file=sys.stderr)
        self._fail("build")

    def _fail(self, when: str) -> None:
        if self.options.during == when:
            FAULTS[self.options.fault]()

    def submit(self, request: Request) -> None:
        self._running.append((request, []))

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[TokenEvent]:
        self._fail("repeat")
        time.sleep(self.options.delay_s)
        self._steps += 1
        events = []
        for _ in range(len(self._running)):
            request, tokens = self._running.popleft()
            events.append(self._advance(request, tokens))
            if events[-1].finish_reason is None:
                self._running.append((request, tokens))
        return events

    def _advance(self, request: Request, tokens: list[int]) -> TokenEvent:
        now = self._context.clock_ns()
        if self.options.output == "empty":
            return TokenEvent(request.request_id, (), now, FinishReason.STOP)
        tokens.append(5 if self.options.output == "same" else 3 + len(tokens))
        done = len(tokens) == request.sampling.max_new_tokens
        return TokenEvent(request.request_id, (tokens[-1],), now, FinishReason.LENGTH if done else None)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return [Score([-1.0], [0]) for _ in requests]

    def report(self) -> EngineReport:
        check = {"passed": True} if self.options.passes else {"passed": False, "reason": "logits differ"}
        return EngineReport(
            executed={"engine": {"class": "FakeEngine"}},
            setup_s={"load": 0.01},
            weight_bytes=1000,
            self_check=check,
            counters={"steps": self._steps},
        )

    def reset(self) -> None:
        if self.options.journal:
            with open(self.options.journal, "a") as file:
                file.write(self.options.letter)
        self._running.clear()
        self._steps = 0.0

    def close(self) -> None:
        self._fail("close")


class FakeWorkload:
    def __init__(self, options: FakeWorkloadOptions) -> None:
        self.concurrency = options.concurrency
        self._options = options

    def requests(self, repeat: int) -> list[Request]:
        sampling = SamplingParams(max_new_tokens=self._options.max_new_tokens, ignore_eos=True)
        count = self._options.num_requests
        return [Request(request_id=f"r{i}", prompt_ids=(1, 2, i + 3), sampling=sampling) for i in range(count)]


class FakeWorkloadOptions(WorkloadOptions, frozen=True, kw_only=True):
    num_requests: Annotated[int, Meta(ge=0)] = 3
    max_new_tokens: Annotated[int, Meta(ge=1)] = 8
    concurrency: int = 2


class FakeEvaluator:
    """What the fake engine's options say."""

    def evaluate(self, engine: FakeEngine) -> list[Quality]:
        value = engine.options.perplexity
        return [Quality(name="perplexity[fake]", value=value, unit="perplexity", better="lower", samples=[value])]


class DistanceEvaluator:
    """Largest difference of log-probabilities from the reference engine."""

    def __init__(self, context: EvaluatorContext) -> None:
        self._context = context

    def evaluate(self, engine: Engine) -> list[Quality]:
        request = ScoreRequest(tuple(range(1, 20)))
        (ours,) = engine.score([request])
        reference = self._context.reference()
        (theirs,) = reference.score([request])
        distance = max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
        details = {"engine": type(reference).__name__, "kv": reference.report().executed["kv"]["class"]}
        reference.close()
        return [Quality(name="distance", value=distance, unit="nats", better="lower", details=details)]


@hookimpl
def infermix_engine() -> list[Component]:
    return [
        Component(
            name="fake",
            role=Role.ENGINE,
            summary="no model",
            build=FakeEngine,
            options=FakeOptions,
            provides=lambda options, model, machine: frozenset({"engine:score"}),
        )
    ]


@hookimpl
def infermix_workload() -> list[Component]:
    return [
        Component(
            name="fake",
            role=Role.WORKLOAD,
            summary="three-token prompts",
            build=lambda options, context: FakeWorkload(options),
            options=FakeWorkloadOptions,
        )
    ]


@hookimpl
def infermix_evaluator() -> list[Component]:
    return [
        Component(
            name="fake",
            role=Role.EVALUATOR,
            summary="what the engine's options say",
            build=lambda options, context: FakeEvaluator(),
        ),
        Component(
            name="distance",
            role=Role.EVALUATOR,
            summary="distance from the reference",
            build=lambda options, context: DistanceEvaluator(context),
        ),
    ]
