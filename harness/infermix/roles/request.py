"""Requests, sequences and token events: what travels between workload, engine and scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy. `seed` fixes the draw of this request alone.

    `num_outputs` outputs come back for one prompt, each drawn with noise of its own; a decoder that searches returns
    its best ones.
    """

    max_new_tokens: int = 128
    num_outputs: int = 1
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. `arrival_s` is the intended arrival, in seconds from the start of its repeat.

    Only requests of equal `cache_salt` share cached prefixes. `priority`: smaller is more urgent. `tenant` is who
    pays, for schedulers that share between tenants.

    With `after`, the request arrives `think_s` seconds after the request of that id has ended, whatever `arrival_s`
    says: the next turn of a session.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    arrival_s: float = 0.0
    category: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    after: str = ""
    think_s: float = 0.0


class FinishReason(enum.StrEnum):
    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens that reached the host together. `time_ns` is the clock where they were received.

    `output` counts the outputs of the request from 0; each has a finish reason of its own.
    """

    request_id: str
    token_ids: tuple[int, ...]
    time_ns: int
    finish_reason: FinishReason | None = None
    output: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside an engine.

    `tokens` are prompt and committed output; `num_inflight` counts tokens that are sampled on the device but not
    yet read; both together never exceed `max_tokens`. `num_computed` counts tokens whose K and V are in the store
    once every launched step has run; `num_cached` of them a prefix cache has just served (the engine counts them at
    the next launch). `lane` is the row of the engine's persistent device buffers, `output` which of the
    request's outputs it becomes.
    """

    seq_id: int
    request: Request
    tokens: list[int]
    num_prompt_tokens: int
    lane: int = -1
    num_computed: int = 0
    num_cached: int = 0
    num_inflight: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_text: str = ""
    output: int = 0
    extra: dict[str, object] = field(default_factory=dict)
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_tokens = self.num_prompt_tokens + self.request.sampling.max_new_tokens

    @property
    def num_tokens(self) -> int:
        """All known tokens, those in flight included."""
        return len(self.tokens) + self.num_inflight

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """New tokens that the next forward has to process."""
        return self.num_tokens - self.num_computed

    @property
    def exhausted(self) -> bool:
        """Nothing is left to launch: its last token is sampled, or it ended."""
        return self.finish_reason is not None or len(self.tokens) + self.num_inflight >= self.max_tokens
