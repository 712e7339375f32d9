"""Role: engine. Above this protocol nobody knows which engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from infermix.roles.component import Options

if TYPE_CHECKING:
    from pathlib import Path

    from infermix.roles.component import Choice, Registered, Role
    from infermix.roles.facts import MachineFacts, ModelFacts, ResolvedSource
    from infermix.roles.request import Request, TokenEvent


class EngineOptions(Options, frozen=True):
    """Base of the options of an engine that reads files, or stands for another machine than the one at hand."""

    def check(self, base: Path) -> None:
        """Raises `UserError` when files that the options name, relative to `base`, cannot be used."""

    def machine(self, here: MachineFacts, dtype: str, base: Path) -> MachineFacts:
        """The machine whose memory and speed count."""
        return here


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine is built from.

    `parts` are the chosen components per hosted role, `clock_ns` the one
    clock, `progress(phase, fraction)` reports set-up, `max_model_len` and `max_num_seqs` bound what the workload and
    the evaluators will ask for, `base` is the folder that relative paths start from, `transforms` are those that the
    experiment asks for, in order (empty for an engine that does not host `Role.TRANSFORM`). `kv_swap_bytes` is the
    host memory for swapped-out sequences.
    `find` looks up components that a part names in its options.
    """

    source: ResolvedSource
    facts: ModelFacts
    machine: MachineFacts
    dtype: str
    parts: Mapping[Role, Choice]
    max_model_len: int
    max_num_seqs: int
    seed: int
    clock_ns: Callable[[], int]
    progress: Callable[[str, float], None] = lambda phase, fraction: None
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float = 0.9
    kv_swap_bytes: int | None = None
    base: Path | None = None
    transforms: tuple[Choice, ...] = ()
    find: Callable[[Role, str], Registered] | None = None


@dataclass(kw_only=True)
class EngineReport:
    """What really ran, for the record. `executed` maps role -> implementation facts (class, kernel, via, dtype).

    Under `transforms` it holds a list with one entry (`name`, facts) per applied transform. `kv_bytes_per_token` is
    what one more token takes in all layers; `kv_allocated_bytes_per_token` what a sequence of the longest length
    takes, over its tokens: tails, states and the rest of its last block count, what a ring overwrites does not.
    """

    executed: dict[str, Any] = field(default_factory=dict)
    setup_s: dict[str, float] = field(default_factory=dict)
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    kv_bytes_per_token: float | None = None
    kv_allocated_bytes_per_token: float | None = None
    self_check: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Log-probabilities of `token_ids[first:]`, each given everything before it.

    `protocol` is `prefill` (one pass) or `decode` (one token at a time, through the KV cache).
    """

    token_ids: tuple[int, ...]
    first: int = 1
    protocol: str = "prefill"
    want_logits: bool = False


@dataclass(slots=True)
class Score:
    """`logprobs[i]` and `top1[i]` (the argmax) for `token_ids[first + i]`; `logits [n, V]` is fp32 on the CPU."""

    logprobs: list[float]
    top1: list[int]
    logits: Any = None


class Tokenizer(Protocol):
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...


class Engine(Protocol):
    """A running model. Not thread-safe; one step at a time.

    An engine that can be calibrated may have `step_log() -> rows | None`, since the last `reset`: per step sequences,
    new tokens, tokens of context, (query, key) pairs of prompts, seconds (`cost.step_model.StepWork`).

    An engine whose time is virtual has `clock` (`measure.clock.Clock`), which its `step` moves, and:

    - `expect(time_ns)`, told before every step: nothing arrives before that moment of its clock (`None`: before
      a request ends), so `step` may go on until then;
    - `gaps() -> record.gaps.GapHistogram` since the last `reset`, when its events tell only of first and last tokens.
    """

    #: `None` for a model without a tokenizer (dummy weights).
    tokenizer: Tokenizer | None

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `UserError` when the prompt is empty or longer than the model's positions."""
        ...

    def step(self) -> list[TokenEvent]:
        """Advance; returns the tokens that reached the host, possibly none."""
        ...

    @property
    def has_work(self) -> bool: ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Quality through the same weights and parts. Only when idle.

        What an engine can do of this it provides as features, and evaluators need them: `engine:score` (protocol
        `prefill`), `engine:score_decode`, `engine:logits`. It raises `Unsupported` for the rest.
        """
        ...

    def report(self) -> EngineReport: ...

    def reset(self) -> None:
        """Drop all requests and cached state between repeats; counters restart."""
        ...

    def close(self) -> None: ...
