"""What a plugin registers: a `Component` is data about one choice for one role, and imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from infermix.roles.environment import Environment
    from infermix.roles.facts import MachineFacts, ModelFacts
    from infermix.roles.training import Trainer


class Role(enum.StrEnum):
    """The five parts of an inference stack, transforms of the model, and the three roles around it."""

    ATTENTION = "attention"
    KV = "kv"
    QUANTIZER = "quantizer"
    DECODER = "decoder"
    SCHEDULER = "scheduler"
    TRANSFORM = "transform"
    ENGINE = "engine"
    WORKLOAD = "workload"
    EVALUATOR = "evaluator"


#: The roles that appear under `parts:` in an experiment, in the order in which tables show them.
PART_ROLES = (Role.ATTENTION, Role.KV, Role.QUANTIZER, Role.DECODER, Role.SCHEDULER)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every option set.

    Declare fields as `Annotated[int, msgspec.Meta(ge=1, description="...", extra={"unit": "tokens"})] = 16`:
    type, range, documentation and unit are read from there by validation, `infermix plugins` and the JSON Schema.
    """


Features = frozenset[str]
FeatureRule = Callable[[Any, "ModelFacts", "MachineFacts"], Features]


def no_features(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    """The rule of a component that needs (or provides) nothing."""
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class Component:
    """One registered choice.

    `build(options, context)` returns the part; heavy libraries are imported inside it. What `context` is and what
    comes back is fixed per role in `infermix.hookspecs`. `needs` and `provides` are pure functions of
    (options, model facts, machine facts) and return feature names such as `kv:truncate`; a need `a|b` is met by
    either, a provided `head_dim:*` meets every `head_dim:` need. `adapters` (same signature, returning a mapping
    feature -> adapter name) lists features that the component offers only through a declared adapter. `weight_bits`
    is a quantizer's (or a quantizing engine's) effective bits per quantized weight, scales included, for the memory
    prediction. `kv_error` says how far what a lossy KV layout gives back is from what was written: root mean square
    of the difference over that of the numbers, for normally distributed ones; `None` where the layout does not bound
    it. `trainer` trains what the component loads (`infermix train-heads`). `hosts` are the roles that an engine takes
    from `parts:`, and `Role.TRANSFORM` when it applies `transforms:`.
    `environment` is one beside ours that the component needs; it is unavailable until a user has made it.
    """

    name: str
    role: Role
    summary: str
    build: Callable[[Any, Any], Any]
    options: type[Options] = Options
    requires: tuple[str, ...] = ()
    extra: str | None = None
    environment: Environment | None = None
    needs: FeatureRule = no_features
    provides: FeatureRule = no_features
    adapters: Callable[[Any, ModelFacts, MachineFacts], Mapping[str, str]] = lambda o, m, h: {}
    lossless: Callable[[Any], bool] = lambda options: True
    weight_bits: Callable[[Any], float | None] = lambda options: None
    kv_error: Callable[[Any], float | None] = lambda options: None
    hosts: frozenset[Role] = frozenset()
    trainer: Trainer | None = None
    source: str = ""


@dataclass(frozen=True)
class Provenance:
    """Where a component came from."""

    distribution: str
    version: str
    module: str


@dataclass(frozen=True)
class Registered:
    """A component with its provenance and, when it cannot be used here, the reason and the remedy."""

    component: Component
    provenance: Provenance
    unavailable: str | None = None


def meets(need: str, provided: Features) -> bool:
    """Whether `provided` satisfies `need` (alternatives with `|`, wildcards `prefix:*` on the providing side)."""
    return any(option in provided or f"{option.rpartition(':')[0]}:*" in provided for option in need.split("|"))


@dataclass(frozen=True)
class Choice:
    """A component picked by an experiment, with its validated options."""

    registered: Registered
    options: Any
    via: Mapping[str, str] = field(default_factory=dict)

    @property
    def component(self) -> Component:
        return self.registered.component
