"""Small simulated engines and loads."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
from infermix.cost.step_model import Roofline
from infermix.engine.simulated.engine import SimulatedEngine
from infermix.engine.simulated.replica import Replica
from infermix.engine.simulated.step_clock import StepClock
from infermix.engine.simulated.virtual_clock import VirtualClock
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.engine import EngineReport
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.request import Request, SamplingParams
from infermix.toolkit.routing import make_router

SCHEDULERS = {each.component.name: each.component for each in load_catalogue().all(Role.SCHEDULER)}
KV = {each.component.name: each.component for each in load_catalogue().all(Role.KV)}
GROUPS = (KVGroup((0,), 1, 1, 1),)
#: A step of one sequence takes about 10 ms, 1000 new tokens 100 ms more, 1000 tokens of context 1 ms.
STEPS = Roofline(1e7, 1e3, 1e5, 1e2, 1e9, 1e9)


def simulated(
    scheduler: str = "continuous",
    *,
    most: int = 8,
    blocks: int = 1000,
    replicas: int = 1,
    router: str = "round_robin",
    kv: dict[str, Any] | None = None,
    detail: str = "tokens",
    jump: bool = True,
    **options: Any,
) -> SimulatedEngine:
    component = SCHEDULERS[scheduler]
    known = {field.name for field in msgspec.structs.fields(component.options)}
    chosen = msgspec.convert({k: v for k, v in options.items() if k in known}, component.options)
    layout = KV["paged"].build(msgspec.convert({"block_size": 16, **(kv or {})}, KV["paged"].options), None)
    longest = min(1024, 16 * blocks)
    size = 16 * 2 * 2 * (blocks + 1)
    shape = layout.shape(GROUPS, KVBudget(max(most, blocks), longest, 2, max_bytes=size))
    clock = StepClock(None, STEPS)

    def make(gaps: Any) -> list[Replica]:
        return [
            Replica(
                component.build(chosen, most), layout.space(shape), clock.seconds, gaps,
                each_token=detail == "tokens", jump=jump,
            )
            for _ in range(replicas)
        ]  # fmt: skip

    return SimulatedEngine(
        report=EngineReport(), make_replicas=make, router=make_router(router, replicas), clock=VirtualClock(),
        step_clock=clock, max_model_len=longest,
    )  # fmt: skip


def load(count: int, rate: float, seed: int = 0, longest: int = 60) -> Sequence[Request]:
    """Poisson arrivals of random lengths, classes and tenants."""
    random, now_s, made = Random(seed), 0.0, []
    for index in range(count):
        made.append(
            Request(
                request_id=str(index),
                prompt_ids=tuple(random.randrange(1000) for _ in range(random.randint(1, longest))),
                sampling=SamplingParams(max_new_tokens=random.randint(1, longest), ignore_eos=True),
                arrival_s=now_s,
                priority=random.randint(0, 2),
                tenant=random.choice("ab"),
                category=random.choice("xy"),
            )
        )
        now_s += random.expovariate(rate)
    return made
