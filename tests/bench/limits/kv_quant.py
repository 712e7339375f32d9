"""Quantized KV against bf16 KV on one GPU: sequences that fit, and decode tokens/s. 8B shape, random weights.

    python tests/bench/limits/kv_quant.py --json kv_quant.json [--layouts paged int8 fp8 int4 int2]
        [--batch 64] [--context 8192]

Needs a GPU and this repository's three roots on the path. Engines of the Triton attention with fused layers are built
one after the other, self-check included; the first layout is what the others are divided by. For each:

- `sequences_that_fit`: sequences of `context` tokens in the memory that the KV gets beside the weights, from the same
  layout code that allocates; `bytes_per_token` with what a sequence costs besides its tokens shared out over them;
- `tokens_per_s`, `step_ms`: a decode step of `batch` sequences at about `context` tokens, over whole engine steps,
  median of `STEPS`; `graph_steps` says how many of them were replays; `kv_bytes_per_s` is the KV of one step over it;
- `self_check`: what the load-time check found the layout to lose.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from infermix.cost.kv import kv_groups
from infermix.cost.kv_capacity import kv_room, sequences_that_fit
from infermix.cost.machine import machine_facts
from infermix.cost.memory import predict_memory
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.measure.clock import now_ns
from infermix.plugins import load_catalogue
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext
from infermix.roles.kv_space import KVBudget
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "paged": ("paged", {"block_size": 64}),
    "int8": ("quantized", {"dtype": "int8", "block_size": 64}),
    "fp8": ("quantized", {"dtype": "fp8", "block_size": 64}),
    "int4": ("kivi", {"bits": 4}),
    "int2": ("kivi", {"bits": 2}),
}
#: What each is to reach, divided by the first layout: sequences that fit, decode tokens/s.
TARGETS = {"int8": (1.9, 1.45)}
STEPS, WARM_STEPS, TOKEN_IDS = 48, 8, 30000


def choose(role: Role, name: str, **options: Any) -> Choice:
    registered = load_catalogue().find(role, name)
    return Choice(registered, registered.component.options(**options))


def facts_and_source() -> tuple[Any, Any]:
    source = resolve_source(ModelSource(source="shape:llama-3-8b", weights="dummy"), Path("."))
    return read_model_facts(source, dtype="bfloat16", dummy=True), source


def fitting(layout: Any, context: int) -> dict[str, float]:
    """Sequences in the memory that a plan gives to the KV, and bytes of one of their tokens."""
    facts, _ = facts_and_source()
    machine = machine_facts("cuda")
    others = predict_memory(facts, None, device="cuda", max_num_batched_tokens=8192, max_num_seqs=64)
    room = kv_room(machine, others, None, None)
    budget = KVBudget(1, context, 2)
    shape = layout.shape(kv_groups(facts), budget)
    return {
        "kv_room_bytes": room,
        "sequences_that_fit": sequences_that_fit(layout, kv_groups(facts), budget, room) or 0,
        "bytes_per_token": shape.bytes_per_token + shape.bytes_per_seq / context,
    }


def build(kv: Choice, batch: int, context: int) -> Any:
    facts, source = facts_and_source()
    parts = {
        role: choose(role, {**DEFAULT_PARTS, "attention": "triton"}[role.value])
        for role in PART_ROLES
        if role not in (Role.KV, Role.SCHEDULER)
    }
    scheduler = choose(Role.SCHEDULER, "continuous", max_num_seqs=batch, max_num_batched_tokens=8192)
    engine_context = EngineContext(
        source=source,
        facts=facts,
        machine=machine_facts("cuda"),
        dtype="bfloat16",
        parts={**parts, Role.KV: kv, Role.SCHEDULER: scheduler},
        transforms=(choose(Role.TRANSFORM, "fuse"),),
        max_model_len=context,
        max_num_seqs=batch,
        seed=0,
        clock_ns=now_ns,
    )
    native = choose(Role.ENGINE, "native")
    return native.component.build(native.options, engine_context)


def decode(engine: Any, batch: int, context: int) -> dict[str, float]:
    """All sequences are prefilled, then steps are timed at the end of their contexts."""
    new = STEPS + 4 * WARM_STEPS + 2 * batch
    for number in range(batch):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(10, TOKEN_IDS, (context - new,), generator=generator).tolist()
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=tuple(ids), sampling=sampling))
    produced = dict.fromkeys(map(str, range(batch)), 0)
    while min(produced.values()) < WARM_STEPS:
        for event in engine.step():
            produced[event.request_id] += len(event.token_ids)
    before, times = engine.report().counters["graph_steps"], []
    torch.cuda.synchronize()
    for _ in range(STEPS):
        start = now_ns()
        engine.step()
        times.append((now_ns() - start) / 1e9)
    torch.cuda.synchronize()
    step_s = statistics.median(times)
    return {
        "step_ms": 1e3 * step_s,
        "mean_step_ms": 1e3 * statistics.fmean(times),
        "tokens_per_s": batch / step_s,
        "graph_steps": engine.report().counters["graph_steps"] - before,
    }


def rows(names: list[str], batch: int, context: int) -> Iterator[dict[str, Any]]:
    base: dict[str, Any] = {}
    for name in names:
        component, options = LAYOUTS[name]
        kv = choose(Role.KV, component, **options)
        row: dict[str, Any] = {"layout": name, "batch": batch, "context": context}
        row |= fitting(kv.component.build(kv.options, None), context)
        engine = build(kv, batch, context)
        row |= decode(engine, batch, context)
        report = engine.report()
        row["kv_bytes_per_s"] = batch * context * row["bytes_per_token"] / (row["step_ms"] / 1e3)
        row["kv_allocated_bytes"] = report.kv_bytes
        row["executed"] = {role: report.executed[role] for role in ("attention", "kv")}
        row["self_check"], row["graphs"] = report.self_check, report.graphs
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        base = base or row
        row["sequences_ratio"] = row["sequences_that_fit"] / base["sequences_that_fit"]
        row["tokens_per_s_ratio"] = row["tokens_per_s"] / base["tokens_per_s"]
        row["targets"] = TARGETS.get(name)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    done = []
    for row in rows(args.layouts, args.batch, args.context):
        done.append(row)
        shown = {key: value for key, value in row.items() if not isinstance(value, dict)}
        print(json.dumps(shown, default=str), flush=True)
        if args.json:
            args.json.write_text(json.dumps(done, indent=2, default=str))


if __name__ == "__main__":
    main()
