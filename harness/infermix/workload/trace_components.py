"""Options of workloads that replay traffic: traces and sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from infermix.roles.component import Component, Role
from infermix.roles.workload import Workload, WorkloadContext
from infermix.workload.components import (
    Length,
    RequestOptions,
    Tokens,
    bounds,
    outputs_needed,
    random_tokens,
)

SECONDS = {"unit": "s"}


class TraceOptions(RequestOptions, frozen=True, kw_only=True):
    """Arrivals and lengths of a recorded trace; the tokens are synthetic, with exactly the trace's lengths.

    `arrivals` replaces the trace's times, `concurrency` its open loop; both keep its lengths in their order. What is
    left out or clipped is counted in the record (`environment.workload`).
    """

    path: Annotated[str, Meta(min_length=1, description="CSV or JSONL file, relative to the experiment")]
    format: Annotated[
        Literal["auto", "plain", "azure", "burstgpt", "mooncake"],
        Meta(
            description="columns of the file; auto: from its head; plain: arrival_s, input_tokens, output_tokens; "
            "mooncake: JSONL whose hash_ids become shared prefixes"
        ),
    ] = "auto"
    num_requests: Annotated[int, Meta(ge=1, description="most requests of one repeat; null: all")] | None = None
    copies: Annotated[
        int,
        Meta(
            ge=1,
            description="replay it so many times in a row; prefix caches serve nothing of another copy, whose tokens "
            "are the same",
        ),
    ] = 1
    start_s: Annotated[float, Meta(ge=0, description="begin at this time of the trace", extra=SECONDS)] = 0.0
    duration_s: (
        Annotated[float, Meta(gt=0, description="length of the trace that is replayed; null: all", extra=SECONDS)]
        | None
    ) = None
    speed: Annotated[float, Meta(gt=0, description="2 replays the trace in half its time")] = 1.0
    length_scale: Annotated[
        float, Meta(gt=0, le=1, description="factor of all lengths (and of shared blocks), for smaller models")
    ] = 1.0
    max_input_tokens: Annotated[Tokens, Meta(description="longest prompt; null: what the model allows")] | None = None
    max_output_tokens: Annotated[Tokens, Meta(description="longest output; null: what the model allows")] | None = (
        None
    )
    too_long: Annotated[
        Literal["refuse", "clip", "skip"],
        Meta(description="requests beyond these limits: an error, shortened, or left out; the last two are counted"),
    ] = "refuse"
    bad_rows: Annotated[
        Literal["refuse", "skip"],
        Meta(
            description="rows that are no requests (out of order, no tokens, ...): an error, or left out and counted"
        ),
    ] = "refuse"
    tick_s: (
        Annotated[
            float,
            Meta(
                ge=0,
                description="resolution of the trace's clock: arrivals of one tick are spread over it; "
                "null: 3 s for a Mooncake trace in such ticks, otherwise 0",
                extra=SECONDS,
            ),
        ]
        | None
    ) = None
    block_tokens: Annotated[
        int, Meta(ge=1, description="tokens of one of Mooncake's hash ids", extra={"unit": "tokens"})
    ] = 512
    ignore_eos: Annotated[bool, Meta(description="go on after the end of sequence")] = True

    def check(self, base: Path) -> None:
        from infermix.workload.trace_files import read_trace

        read_trace(self, base)

    def max_request_tokens(self) -> int | None:
        if self.max_input_tokens is None or self.max_output_tokens is None:
            return None
        return self.max_input_tokens + self.max_output_tokens

    def most_requests(self) -> int | None:
        return self.num_requests


class SessionsOptions(RequestOptions, frozen=True, kw_only=True):
    """Conversations: every turn repeats the session so far and adds to it, `think_s` after the answer before.

    Answers in later prompts are recorded (synthetic) ones, so that lengths and prompts are the same for every engine;
    a prefix cache can serve everything of the turns before except the answers. `arrivals` is when sessions start;
    `concurrency` counts sessions.
    """

    num_sessions: Annotated[int, Meta(ge=1, description="sessions of one repeat")] = 8
    turns: Annotated[Length, Meta(description="turns of a session, a number or a distribution")] = 4
    system_tokens: Annotated[
        int, Meta(ge=0, description="first tokens that all sessions share", extra={"unit": "tokens"})
    ] = 0
    input_tokens: Annotated[Length, Meta(description="tokens that a turn adds, a number or a distribution")] = 64
    output_tokens: Annotated[Length, Meta(description="length of an answer, a number or a distribution")] = 64
    think_s: Annotated[
        float, Meta(ge=0, le=1e6, description="mean time from an answer to the next turn", extra=SECONDS)
    ] = 1.0
    think_exponential: Annotated[bool, Meta(description="draw it from an exponential distribution")] = False
    ignore_eos: Annotated[bool, Meta(description="go on after the end of sequence")] = True

    def max_request_tokens(self) -> int:
        turn = bounds(self.input_tokens)[1] + bounds(self.output_tokens)[1]
        return self.system_tokens + bounds(self.turns)[1] * turn

    def most_requests(self) -> int:
        return self.num_sessions * bounds(self.turns)[1]

    def max_in_flight(self) -> int:
        return min(self.num_sessions, self.concurrency or self.num_sessions)


def _trace(options: Any, context: WorkloadContext) -> Workload:
    from infermix.workload.assemble import PreparedWorkload
    from infermix.workload.trace import TraceSource

    return PreparedWorkload(options, context.seed, TraceSource(options, context))


def _sessions(options: Any, context: WorkloadContext) -> Workload:
    from infermix.workload.assemble import PreparedWorkload
    from infermix.workload.sessions import SessionSource

    return PreparedWorkload(options, context.seed, SessionSource(options, context))


COMPONENTS = (
    Component(
        name="trace",
        role=Role.WORKLOAD,
        summary="arrivals and lengths of a recorded trace (Azure, BurstGPT, Mooncake), synthetic tokens",
        build=_trace,
        options=TraceOptions,
        needs=outputs_needed,
        provides=random_tokens,
    ),
    Component(
        name="sessions",
        role=Role.WORKLOAD,
        summary="multi-turn conversations with growing shared prefixes, closed loop inside a session",
        build=_sessions,
        options=SessionsOptions,
        needs=outputs_needed,
        provides=random_tokens,
    ),
)
