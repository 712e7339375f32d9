"""Whether a cell fits: its lengths into the model's positions, its weights and KV into the machine's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from infermix.cost.kv import kv_groups, layer_states, stored_groups
from infermix.cost.kv_capacity import kv_limit, kv_room, sequences_that_fit
from infermix.cost.memory import USABLE_SHARE, MemoryPrediction, fits, predict_memory
from infermix.engine.simulated.components import SIMULATED
from infermix.errors import UserError
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.decoder import DecoderOptions
from infermix.roles.engine import EngineContext, EngineOptions
from infermix.roles.evaluator import EvaluatorOptions
from infermix.roles.facts import MachineFacts, ModelFacts
from infermix.roles.kv_space import KVBudget, KVLayout, KVShape
from infermix.roles.workload import WorkloadOptions
from infermix.spec.experiment import Limits
from infermix.toolkit.host_blocks import with_host_blocks

#: Assumed where only the data tells how long a sequence is, and how many run at once.
_ASSUMED_TOKENS = 2048
_ASSUMED_SEQS = 256
#: New tokens of the largest forward where the scheduler does not bound them.
_ASSUMED_STEP_TOKENS = 2048
#: Feature of an engine whose KV takes its share of the device at start-up, whatever the sequences need.
FILLS_MEMORY = "engine:fills_memory"
#: Provided by an engine whose KV takes what its requests need, whatever limits are stated.
GROWS_MEMORY = "engine:grows_memory"


@dataclass(frozen=True)
class Fit:
    """Sizes of a cell and what is wrong with them. `memory` is `None` when nothing could be predicted.

    `sequences_that_fit` of `max_model_len` tokens have room beside the rest; `None` without a KV layout, or with one
    that memory does not bound.
    """

    max_model_len: int
    max_num_seqs: int
    memory: MemoryPrediction | None
    problems: tuple[str, ...]
    sequences_that_fit: int | None = None


@dataclass(frozen=True)
class Second:
    """A model beside the target: what its weights take (0: they are the target's own), and one token of its KV."""

    weight_bytes: int
    kv_bytes_per_token: float


@dataclass(frozen=True)
class _Demand:
    """Everything that the memory of a cell depends on, hashable."""

    facts: int
    layout: tuple[str, bytes] | None
    weight_bits: float | None
    length: int
    count: int
    step_tokens: int
    num_draft_tokens: int
    assumed: bool
    limits: Limits
    replicas: int
    machine: str
    fills_memory: bool
    simulated: bool
    swaps: bool
    second: Second | None


_Sizes = tuple[MemoryPrediction | None, tuple[str, ...], int | None]


class Fitter:
    """Predicts the sizes of cells; each distinct layout and each distinct demand once."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, bytes], KVLayout] = {}
        self._known: dict[_Demand, _Sizes] = {}

    def fit(
        self,
        limits: Limits,
        choices: Mapping[Role, Choice],
        evaluators: Iterable[Choice],
        facts: ModelFacts,
        machine: MachineFacts,
        second: Second | None = None,
        *,
        inner: Sequence[Choice] = (),
        base: Path = Path("."),
    ) -> Fit:
        """`choices` are the hosted parts, the engine and the workload; `facts.dtype` is the cell's.

        `inner` are decoders inside the decoder, `base` is what paths in the engine's options are relative to.
        """
        asked = dict(_asked_tokens(choices[Role.WORKLOAD], evaluators))
        problems = tuple(_length_problems(asked, limits, facts))
        length = min(max(asked.values(), default=0) or _ASSUMED_TOKENS, _longest(limits, facts))
        count = _max_num_seqs(choices)
        if not facts.matrices:
            return Fit(length, count, None, problems)
        drafts = max(map(_num_draft_tokens, (choices.get(Role.DECODER), *inner)))
        machine = _machine_of(choices.get(Role.ENGINE), machine, facts.dtype, base)
        memory, more, fitting = self._memory(limits, choices, facts, machine, length, count, second, drafts)
        unused = _unused_limits(limits, choices, facts, machine)
        return Fit(length, count, memory, (*problems, *more, *unused), fitting)

    def _memory(
        self,
        limits: Limits,
        choices: Mapping[Role, Choice],
        facts: ModelFacts,
        machine: MachineFacts,
        length: int,
        count: int,
        second: Second | None,
        num_draft_tokens: int,
    ) -> _Sizes:
        kv, quantizer = choices.get(Role.KV), choices.get(Role.QUANTIZER, choices.get(Role.ENGINE))
        engine = choices.get(Role.ENGINE)
        provided = engine.component.provides(engine.options, facts, machine) if engine else frozenset()
        demand = _Demand(
            facts=id(facts),
            layout=(kv.component.name, msgspec.json.encode(kv.options)) if kv else None,
            weight_bits=quantizer.component.weight_bits(quantizer.options) if quantizer else None,
            length=length,
            count=count,
            step_tokens=max(_option(choices, "max_num_batched_tokens") or _ASSUMED_STEP_TOKENS, length),
            num_draft_tokens=num_draft_tokens,
            assumed=_only_data_tells(choices[Role.WORKLOAD]),
            limits=limits,
            replicas=1 if SIMULATED in provided else getattr(engine.options if engine else None, "replicas", 1),
            machine=f"{machine.device} {machine.memory_bytes}",
            fills_memory=FILLS_MEMORY in provided,
            simulated=SIMULATED in provided,
            swaps=_swaps(choices, facts, machine),
            second=second,
        )
        if demand not in self._known:
            self._known[demand] = self._predict(demand, kv, facts, machine)
        return self._known[demand]

    def _predict(self, demand: _Demand, kv: Choice | None, facts: ModelFacts, machine: MachineFacts) -> _Sizes:
        memory = predict_memory(
            facts,
            None,
            device=machine.device,
            weight_bits=demand.weight_bits,
            max_num_batched_tokens=demand.step_tokens,
            max_num_seqs=demand.count,
        )
        memory = replace(memory, second_bytes=_second_bytes(demand))
        if demand.simulated:
            return None, self._simulated_problems(demand, kv, facts, machine, memory), None
        try:
            fitting = self._fitting(demand, kv, facts, machine, memory)
            kv_bytes, problems = self._kv(demand, kv, facts, machine, memory)
            memory = replace(memory, kv_bytes=kv_bytes)
        except UserError as error:
            return memory, _told(error, demand), None
        # What is only assumed refuses nothing: the data may hold one short prompt.
        surely = replace(memory, kv_bytes=0) if demand.assumed else memory
        return memory, problems if fits(surely, machine) else (*problems, _too_large(surely, machine)), fitting

    def _simulated_problems(
        self, demand: _Demand, kv: Choice | None, facts: ModelFacts, machine: MachineFacts, memory: MemoryPrediction
    ) -> tuple[str, ...]:
        """A simulation takes no memory; the KV of the machine that it stands for must hold one sequence."""
        try:
            return self._kv(demand, kv, facts, machine, memory)[1]
        except UserError as error:
            return _told(error, demand)

    def _fitting(
        self, demand: _Demand, kv: Choice | None, facts: ModelFacts, machine: MachineFacts, memory: MemoryPrediction
    ) -> int | None:
        if kv is None or demand.layout is None:
            return None
        layout = self._layout(demand.layout, kv)
        budget = KVBudget(1, demand.length, facts.dtype_bytes, states=layer_states(facts))
        room = kv_room(machine, memory, demand.limits.kv_memory_bytes, demand.limits.kv_memory_fraction)
        return sequences_that_fit(layout, stored_groups(facts, layout), budget, room)

    def _layout(self, key: tuple[str, bytes], kv: Choice) -> KVLayout:
        if key not in self._layouts:
            self._layouts[key] = kv.component.build(kv.options, None)
        return self._layouts[key]

    def _kv(
        self, demand: _Demand, kv: Choice | None, facts: ModelFacts, machine: MachineFacts, memory: MemoryPrediction
    ) -> tuple[int, tuple[str, ...]]:
        """Bytes that the KV takes, and what the layout cannot do for the decoder."""
        if kv is None or demand.layout is None:  # an engine with a cache of its own: what its tokens take
            each = sum(group.bytes_per_token(facts.dtype_bytes) for group in kv_groups(facts))
            if demand.fills_memory:
                return max(_filled(demand.limits, machine, memory), round(each * demand.length)), ()
            return round(each * demand.length * demand.count), ()
        limits = demand.limits
        if limits.kv_memory_fraction is not None and machine.device == "cpu":
            told = f"limits.kv_memory_fraction is {limits.kv_memory_fraction:g}, but a CPU's KV takes what it needs"
            raise UserError(told, hint="state limits.kv_memory_bytes, or leave it out")
        most = kv_limit(machine, memory, limits.kv_memory_bytes, limits.kv_memory_fraction)
        most = None if most is None else most // demand.replicas
        budget = KVBudget(demand.count, demand.length, facts.dtype_bytes, most, states=layer_states(facts))
        layout = self._layout(demand.layout, kv)
        shape = layout.shape(stored_groups(facts, layout), budget)
        if demand.swaps and limits.kv_swap_bytes is not None:
            with_host_blocks(shape, limits.kv_swap_bytes, demand.replicas)
        problems = (*_stored_nothing(kv, shape, limits), *_draft_problems(kv, shape, demand))
        return shape.bytes * demand.replicas, problems


def _told(error: UserError, demand: _Demand) -> tuple[str, ...]:
    """How much memory is needed may only be assumed; whether the layout takes the model at all is not."""
    if demand.assumed and (error.key or "").startswith("limits."):
        return ()
    return (f"{error.message} ({error.hint})" if error.hint else error.message,)


def _machine_of(engine: Choice | None, here: MachineFacts, dtype: str, base: Path) -> MachineFacts:
    """The machine whose memory counts: that of a simulation may be elsewhere."""
    if engine is None or not isinstance(engine.options, EngineOptions):
        return here
    return engine.options.machine(here, dtype, base)


def _unused_limits(
    limits: Limits, choices: Mapping[Role, Choice], facts: ModelFacts, machine: MachineFacts
) -> Iterator[str]:
    if limits.kv_swap_bytes is not None and not _swaps(choices, facts, machine):
        yield (
            f"limits.kv_swap_bytes is {limits.kv_swap_bytes}, but no part of this cell swaps sequences to host "
            "memory (a scheduler with preemption: swap does; state it for those cells alone)"
        )


def ignored_limits(limits: Limits, engine: Choice, facts: ModelFacts, machine: MachineFacts) -> Iterator[str]:
    """Limits that this engine has no use for; stated for all cells of a comparison, they are no mistake."""
    if GROWS_MEMORY in engine.component.provides(engine.options, facts, machine):
        for name in ("kv_memory_bytes", "kv_memory_fraction"):
            if getattr(limits, name) is not None:
                yield (
                    f"limits.{name} is not used by engine {engine.component.name!r}, whose KV takes what its "
                    "requests need"
                )


def _stored_nothing(kv: Choice, shape: KVShape, limits: Limits) -> Iterator[str]:
    for name in ("kv_memory_bytes", "kv_memory_fraction"):
        if getattr(limits, name) is not None and not shape.bytes:
            yield (
                f"limits.{name} is {getattr(limits, name)}, but kv {kv.component.name!r} keeps nothing between steps "
                "(state it for cells with another layout alone)"
            )


def _second_bytes(demand: _Demand) -> int:
    """Its KV only where data does not decide alone how much that is."""
    if demand.second is None:
        return 0
    tokens = 0 if demand.assumed else demand.length * demand.count
    return demand.second.weight_bytes + round(demand.second.kv_bytes_per_token * tokens)


def _asked_tokens(workload: Choice, evaluators: Iterable[Choice]) -> Iterator[tuple[str, int]]:
    """The longest sequence that the workload and each evaluator may ask for, as far as their options tell."""
    if isinstance(workload.options, WorkloadOptions):
        tokens = workload.options.max_request_tokens()
        if tokens is not None:
            yield f"workload {workload.component.name!r}", tokens
    for choice in evaluators:
        tokens = choice.options.max_tokens() if isinstance(choice.options, EvaluatorOptions) else None
        if tokens is not None:
            yield f"evaluator {choice.component.name!r}", tokens


def _only_data_tells(workload: Choice) -> bool:
    """Whether no option says how long the workload's sequences are."""
    return not isinstance(workload.options, WorkloadOptions) or workload.options.max_request_tokens() is None


def _longest(limits: Limits, facts: ModelFacts) -> int:
    return min(facts.max_position_embeddings, limits.max_model_len or facts.max_position_embeddings)


def _length_problems(asked: Mapping[str, int], limits: Limits, facts: ModelFacts) -> Iterator[str]:
    positions = facts.max_position_embeddings
    if limits.max_model_len is not None and limits.max_model_len > positions:
        yield f"limits.max_model_len is {limits.max_model_len}, but the model has {positions} positions"
    bound = _longest(limits, facts)
    source = f"the model has {positions} positions" if bound == positions else f"limits.max_model_len is {bound}"
    for who, tokens in asked.items():
        if tokens > bound:
            yield f"{who} asks for sequences of {tokens} tokens, but {source}"


def _max_num_seqs(choices: Mapping[Role, Choice]) -> int:
    """The smallest of what scheduler and engine admit and what the workload keeps in flight, in rows of a batch."""
    options, rows = choices[Role.WORKLOAD].options, rows_per_sequence(choices)
    in_flight = options.max_in_flight() if isinstance(options, WorkloadOptions) else None
    if in_flight and rows == 1:
        in_flight *= getattr(options, "num_outputs", 1)
    bounds = [_option(choices, "max_num_seqs"), _option(choices, "batch_size"), in_flight]
    return rows * min((bound for bound in bounds if bound), default=_ASSUMED_SEQS)


def rows_per_sequence(choices: Mapping[Role, Choice]) -> int:
    """Rows of a batch, with KV of their own, that the decoder computes for one sequence."""
    decoder = choices.get(Role.DECODER)
    return decoder.options.rows_per_sequence() if decoder and isinstance(decoder.options, DecoderOptions) else 1


def _num_draft_tokens(decoder: Choice | None) -> int:
    return int(getattr(decoder.options, "num_draft_tokens", 0)) if decoder else 0


def _option(choices: Mapping[Role, Choice], name: str) -> int | None:
    """The smallest value that scheduler or engine options give under a vocabulary name."""
    owners = [choices[role].options for role in (Role.SCHEDULER, Role.ENGINE) if role in choices]
    values = [value for owner in owners if (value := getattr(owner, name, None))]
    return min(values, default=None)


def _filled(limits: Limits, machine: MachineFacts, memory: MemoryPrediction) -> int:
    """KV bytes of an engine that takes the stated bytes, or all of its share of the device that is left."""
    if limits.kv_memory_bytes is not None:
        return limits.kv_memory_bytes
    fraction = limits.kv_memory_fraction or EngineContext.kv_memory_fraction
    return max(0, int(fraction * machine.memory_bytes) - memory.total_bytes)


def _swaps(choices: Mapping[Role, Choice], facts: ModelFacts, machine: MachineFacts) -> bool:
    """Whether a part moves sequences to host memory and back."""
    parts = [choice for role, choice in choices.items() if role in PART_ROLES]
    return any("kv:swap" in choice.component.needs(choice.options, facts, machine) for choice in parts)


def _draft_problems(kv: Choice, shape: KVShape, demand: _Demand) -> Iterator[str]:
    """Drafts are verified in one forward with a token before them; at the worst all of them are cut off again.

    A draft model computes all but the last of its drafts itself, in a forward each.
    """
    name, num_draft_tokens = kv.component.name, demand.num_draft_tokens
    if shape.max_query_len is not None and num_draft_tokens >= shape.max_query_len:
        yield (
            f"kv {name!r} takes {shape.max_query_len} tokens of a sequence at once, the decoder verifies "
            f"{num_draft_tokens} drafts and a token of its own (max_chunk_tokens of {num_draft_tokens + 1}, or fewer "
            "draft tokens)"
        )
    if shape.max_truncate is not None and num_draft_tokens > shape.max_truncate:
        yield (
            f"kv {name!r} can take back {shape.max_truncate} tokens of a sequence, the decoder drafts "
            f"{num_draft_tokens}"
        )
    if demand.second is not None and shape.max_rewind is not None and num_draft_tokens > shape.max_rewind + 1:
        yield (
            f"kv {name!r} drops what is behind its window of {shape.max_rewind} tokens while the draft model runs "
            f"{num_draft_tokens} drafts ahead, and does not get it back when they are rejected (at most "
            f"{shape.max_rewind + 1} draft tokens, or a longer window)"
        )


def _too_large(memory: MemoryPrediction, machine: MachineFacts) -> str:
    parts = {"weights": memory.weights_bytes, "KV": memory.kv_bytes, "activations": memory.activation_bytes}
    if memory.second_bytes:
        parts["second model"] = memory.second_bytes
    listing = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    have = machine.memory_bytes * USABLE_SHARE / 1e9
    return f"does not fit: needs {memory.total_bytes / 1e9:.1f} GB ({listing}), has {have:.1f} GB"
