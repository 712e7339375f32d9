"""Role: decoder (decoding strategy). Turns a plan into tokens; two halves so that host work overlaps device work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from infermix.errors import Unsupported
from infermix.roles.component import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from torch import Tensor

    from infermix.roles.engine import Tokenizer
    from infermix.roles.facts import ModelFacts
    from infermix.roles.request import Sequence
    from infermix.roles.scheduler import Plan


@dataclass(frozen=True, slots=True)
class SecondModelUse:
    """A model beside the target, for the memory prediction: `source` as in the experiment (`None`: the target's own
    checkpoint) and the name and options of its quantizer, or the target's weights themselves (`shares_weights`).
    """

    source: str | None = None
    quantizer: str | None = None
    quantizer_options: dict[str, Any] | None = None
    shares_weights: bool = False


@dataclass(frozen=True, slots=True)
class InnerDecoder:
    """A decoder that options name, in their keys `decoder` and `decoder_options`."""

    name: str
    options: Mapping[str, Any]


class DecoderOptions(Options, frozen=True, kw_only=True):
    """Base of the options of decoders that read files, or need more of the engine than one row per sequence."""

    def check(self, base: Path) -> None:
        """Raises `UserError` where files that the options name (relative to `base`) are not there."""

    def misfits(self, facts: ModelFacts) -> Iterator[str]:
        """One sentence for each reason why a model of these facts cannot be decoded so."""
        yield from ()

    def inner_decoder(self) -> InnerDecoder | None:
        """The decoder that this one changes."""
        return None

    def second_model(self) -> SecondModelUse | None:
        """The model that runs beside the target, with KV of its own."""
        return None

    def most_outputs(self) -> int | None:
        """The most outputs of one request that a search returns; `None` where they are drawn, in any number."""
        return None

    def rows_per_sequence(self) -> int:
        """Rows of a batch, each with KV of its own, that one running sequence may take."""
        return 1


class Emission(msgspec.Struct, frozen=True):
    """Tokens that one sequence gained in one step, in order.

    `num_drafts` are the draft tokens that the step put into the KV behind the sequence's own: the first
    `len(token_ids) - 1` of them were accepted, the engine cuts the rest away. With drafts there may be no token: the
    sequence's last one is then processed again. Of drafts in a tree, `path` names those
    that were accepted, by index and in order; the engine then moves their K and V to the front.
    `alternatives` are the further outputs of a request that ends with this emission, each complete, of a decoder that
    returns them itself.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    path: tuple[int, ...] = ()
    alternatives: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """What a forward returns beside the last-row logits: more rows, hidden states.

    `all_logits`: one row per new token. `draft_logits`: of a sequence whose last own token is processed by the step,
    that token's row and one per draft behind it, for at most `most_drafts` of them. `hidden`: what the model's head
    reads, of every new token; only for a decoder that says `reads_hidden`.
    """

    all_logits: bool = False
    draft_logits: bool = False
    hidden: bool = False
    most_drafts: int | None = None


@dataclass(slots=True)
class Forward:
    """`logits [R, V]` on the device. Row i belongs to `sequences[i]`, whose lane is `lanes[i]` (int64, device).

    With `all_logits` or `draft_logits` a sequence has several rows, one per token in order; `positions[i]` is then
    the position of the token that row i predicts (otherwise it is the sequence's next one). `most_likely [R]` int64
    is the token of each row's largest logit where the step found it already (captured steps of last rows alone).

    `hidden [N, D]`, where wanted, has the new tokens of a sequence side by side from `first_rows[seq_id]` on, and row
    i of `logits` comes from its row `hidden_rows[i]`. It may be overwritten by the next forward.

    `draws` says how often a token of the row's position was drawn before, each time with other noise (`None`: never).
    """

    logits: Tensor
    sequences: list[Sequence]
    lanes: Tensor
    positions: list[int] | None = None
    most_likely: Tensor | None = None
    hidden: Tensor | None = None
    hidden_rows: list[int] | None = None
    first_rows: dict[int, int] | None = None
    draws: list[int] | None = None


class Runner(Protocol):
    """The model, driven by a plan."""

    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        """Rows come back only for sequences whose last known token is processed by this step."""
        ...

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room in the KV for `num_tokens` tokens in all, drafts included; `False` (and no change) if there is none.

        The engine takes back what a step did not keep.
        """
        ...

    def copy(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy blocks (source, target) before the next forward, as `KVSpace.fork` asked."""
        ...


class Sampler(Protocol):
    def sample(self, forward: Forward) -> Tensor:
        """Token ids `[R]` int64 on the device; they are also kept there as the next input of each sequence.

        The draw of a sequence depends on its request's seed and the token's position alone.
        """
        ...

    def sample_rows(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        """Token ids `[R]` of a forward with several rows per sequence, each drawn as if the rows before it held.

        `drafts[i]` are the tokens between the sequence's own and row i's prediction; they count for penalties. The
        draws are those that `sample` would make one step at a time. Nothing is kept as next input: the decoder
        decides what was accepted and calls `accept`.
        """
        ...

    def probabilities(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        """The distribution `[R, V]` (fp64, normalised) that each row is drawn from; one-hot for greedy requests."""
        ...

    def accept(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Tell penalties which tokens of a verification step stay."""
        ...


class Captured(NamedTuple):
    """Work of the device that `replay()` queues again, and what it returned: tensors that each replay fills anew."""

    replay: Callable[[], None]
    result: Any


def captures_nothing(work: Callable[[], Any]) -> Captured:
    raise Unsupported("this engine captures nothing")


@dataclass(frozen=True, kw_only=True)
class DecoderContext:
    """What a decoder is built from.

    `model` is the target as the joint drives it (for heads and embeddings), `eos_token_ids` end a request, `base`
    is the folder that relative paths start from, `weight_bytes` what the target's weights take as they are held,
    `second(source, options)` loads another model beside the target, `clock_ns` is the one clock, for time spent
    drafting, `inner(name, options)` builds the decoder that another one wraps. `capture(work)` runs work of the
    decoder's own, which must not wait for the device, and captures it in a CUDA graph; it raises `Unsupported` with
    the reason where it cannot, or must not: the decoder then runs it eagerly and says why in `details`.
    """

    facts: ModelFacts
    device: str
    dtype: str
    max_num_seqs: int
    max_model_len: int
    seed: int = 0
    model: Any = None
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes: int | None = None
    base: Path | None = None
    progress: Callable[[str, float], None] = lambda phase, fraction: None
    second: Callable[..., Any] | None = None
    clock_ns: Callable[[], int] | None = None
    inner: Callable[[str, dict[str, Any]], Any] | None = None
    capture: Callable[[Callable[[], Any]], Captured] = captures_nothing


class Decoder(Protocol):
    """Optional attributes, each with what holds without it:

    - `query_lens: tuple[int, ...]`, the uniform query lengths of its steps that are worth a captured graph; `(1,)`. A
      verification row of n drafts has query length n + 1.
    - `reads_tokens: bool`, whether the next launch depends on tokens of the last step (drafts from the text do): the
      engine then collects a step before it launches the next; `False`.
    - `reads_hidden: bool`, whether it asks forwards for hidden states (`Want.hidden`); `False`.
    - `draft_trees: bool`, whether its drafts may form trees (`Scheduled.draft_parents`); it then needs `kv:move` and
      `attn:tree_mask`; `False`.
    - `counters() -> dict[str, float]`, cumulative figures for the record; and `reset()`, all requests are dropped.
    - `details: Mapping[str, Any]`, what was chosen when it was built, for the record; nothing.
    - `forget(sequence)`, the sequence ended or lost its KV.
    - `prepare(request) -> Request`, what is submitted instead of a request: another prompt, for example.
    - `returns_outputs: bool`, whether all outputs of a request come from its one sequence, at its end: until then the
      decoder emits nothing for it, while the engine counts one token in flight per step; `False`.
    - `uses_sampler: bool`, whether every token comes through the sampler, so that masks can restrict it; `True`.
    - `wrap_space(space, shape) -> KVSpace`, the space as scheduler and engine see it, for a decoder that computes
      several rows per sequence (`DecoderOptions.rows_per_sequence`); the runner goes on with `space`.
    """

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Any:
        """Queue the device work of a step without waiting for it; returns a ticket."""
        ...

    def collect(self, ticket: Any) -> list[Emission]:
        """Wait for the step's sampled ids (the only host read) and hand them over."""
        ...
