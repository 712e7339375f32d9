"""What the two workers say to each other: JSON, one message a line; KV lies in memory that both see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from infermix.roles.component import Choice, Role
from infermix.roles.engine import EngineContext
from infermix.roles.facts import ResolvedSource
from infermix.roles.request import Request

from infermix_disaggregated.device_memory import DeviceBlock


class Part(msgspec.Struct, frozen=True):
    role: str
    name: str
    options: dict[str, Any]


class Spec(msgspec.Struct, tag="spec", kw_only=True):
    """An `EngineContext` without functions: the other process looks its parts up again."""

    source: dict[str, Any]
    dummy: bool
    device: str
    dtype: str
    parts: list[Part]
    transforms: list[Part]
    options: dict[str, Any]
    max_model_len: int
    max_num_seqs: int
    seed: int
    kv_memory_bytes: int | None
    kv_memory_fraction: float
    kv_swap_bytes: int | None
    base: str | None


class Prompt(msgspec.Struct, tag="prompt"):
    request: Request


class Drop(msgspec.Struct, tag="drop"):
    """Forget everything; answered by `Dropped`, after which nothing older comes."""


class Probe(msgspec.Struct, tag="probe"):
    """Put a known pattern on the device; answered by `Probed`."""


class Way(msgspec.Struct, tag="way"):
    """How KV is handed over from now on; through the host until this is said."""

    on_device: bool


Command = Spec | Prompt | Drop | Probe | Way


class Ready(msgspec.Struct, tag="ready"):
    setup_s: dict[str, float]
    weight_bytes: int | None
    kv_bytes: int | None


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """KV in the shared memory `block` of `size` bytes, or on a `device`, with a `ParcelHeader` in JSON."""

    block: str = ""
    size: int = 0
    device: DeviceBlock | None = None
    header: bytes = b""


class Computed(msgspec.Struct, tag="computed", kw_only=True):
    """A prompt's first token, and its KV (none where it ended with it); `counters` are the worker's own so far."""

    request_id: str
    token: int
    stopped: bool
    parcel: Parcel | None = None
    export_s: float = 0.0
    counters: dict[str, float] = {}


class Probed(msgspec.Struct, tag="probed"):
    """The pattern, or why there is none."""

    block: DeviceBlock | None = None
    reason: str = ""


class Dropped(msgspec.Struct, tag="dropped"):
    counters: dict[str, float]


class Failed(msgspec.Struct, tag="failed"):
    reason: str


Reply = Ready | Computed | Dropped | Probed | Failed


def spec_of(context: EngineContext, options: Any) -> Spec:
    source = {**vars(context.source), "config": dict(context.source.config)}
    return Spec(
        source={name: str(value) if isinstance(value, Path) else value for name, value in source.items()},
        dummy=context.facts.dummy_weights,
        device=context.machine.device,
        dtype=context.dtype,
        parts=[_part(role, choice) for role, choice in context.parts.items()],
        transforms=[_part(Role.TRANSFORM, choice) for choice in context.transforms],
        options=msgspec.to_builtins(options),
        max_model_len=context.max_model_len,
        max_num_seqs=context.max_num_seqs,
        seed=context.seed,
        kv_memory_bytes=context.kv_memory_bytes,
        kv_memory_fraction=context.kv_memory_fraction,
        kv_swap_bytes=context.kv_swap_bytes,
        base=None if context.base is None else str(context.base),
    )


def _part(role: Role, choice: Choice) -> Part:
    return Part(role.value, choice.component.name, msgspec.to_builtins(choice.options))


def context_of(spec: Spec, clock_ns: Any) -> EngineContext:
    """The same context in this process. Raises `UserError` for a part that is not registered here."""
    from infermix.cost.machine import machine_facts
    from infermix.cost.model_facts import read_model_facts
    from infermix.plugins import load_catalogue

    catalogue = load_catalogue()

    def choice(part: Part) -> Choice:
        registered = catalogue.find(Role(part.role), part.name)
        return Choice(registered, msgspec.convert(part.options, registered.component.options))

    given = dict(spec.source)
    given["directory"] = Path(given["directory"])
    given["file"] = Path(given["file"]) if given["file"] else None
    source = ResolvedSource(**given)
    facts = read_model_facts(source, dtype="auto", dummy=spec.dummy)
    return EngineContext(
        source=source, facts=replace(facts, dtype=spec.dtype), machine=machine_facts(spec.device), dtype=spec.dtype,
        parts={Role(part.role): choice(part) for part in spec.parts},
        transforms=tuple(choice(part) for part in spec.transforms), max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs, seed=spec.seed, clock_ns=clock_ns, kv_memory_bytes=spec.kv_memory_bytes,
        kv_memory_fraction=spec.kv_memory_fraction, kv_swap_bytes=spec.kv_swap_bytes,
        base=Path(spec.base) if spec.base else None, find=catalogue.find,
    )  # fmt: skip
