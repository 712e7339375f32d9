"""The native engine against the limits of one GPU: decode steps, prefill rates, set-up. Random weights, no download.

    python tests/bench/limits/engine.py --json limits.json [--only 8b,smollm2,8b-w4,8b-int8,8b-fp8] [--profile]
        [--mixed-graph-tokens 2048]

Steps are timed on the host over whole engine steps (schedule, launch, read the tokens of the step before), and beside
them the bare replay of the same graph, so that the difference is what the host and the sampler add. Quantized rows
are also given as ratios to the bf16 engine of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.measure.ceilings import measure_ceilings
from infermix.plugins import Catalogue, load_catalogue
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource

CONTEXT, STEPS, WARM_STEPS = 1024, 64, 8
#: Ids of prompts are below this, which every vocabulary holds.
TOKEN_IDS = 30000
BATCHES = (1, 8, 64)
PREFILLS = ((1, 2048), (4, 2048))
TRANSFORMS = ("fuse", "skinny_linear", "triton_sampling")
#: Stated for the same kind of machine: vLLM's step (ms) and prefill rate (tokens/s), and the stretch of each.
STATED: dict[str, dict[str, tuple[float, float]]] = {
    "8b": {
        "decode 1": (4.96, 4.07), "decode 8": (5.28, 4.34), "decode 64": (7.86, 6.49),
        "prefill 1x2048": (40100, 42105), "prefill 4x2048": (42500, 44625),
    },
    "smollm2": {"decode 1": (1.80, 0.6), "decode 8": (1.74, 1.6), "decode 64": (2.97, 2.5)},
    "8b-w4": {"decode 1": (2.6, 2.1)},
}  # fmt: skip
MODELS: dict[str, tuple[str, str | tuple[str, dict[str, Any]]]] = {
    "8b": ("shape:llama-3-8b", "none"),
    "smollm2": ("shape:smollm2-135m", "none"),
    "8b-w4": ("shape:llama-3-8b", "triton_w4a16"),
    "8b-int8": ("shape:llama-3-8b", "triton_int8"),
    "8b-fp8": ("shape:llama-3-8b", "triton_fp8"),
}
#: How many times as fast as bf16 a row has to be.
LEAST_GAIN: dict[str, dict[str, float]] = {
    "8b-w4": {"decode 64": 1.0},
    "8b-int8": {"prefill 1x2048": 1.2},
    "8b-fp8": {"prefill 1x2048": 1.2, "decode 1": 1.3},
}


def choose(catalogue: Catalogue, role: Role, name: str, **options: Any) -> Choice:
    registered = catalogue.find(role, name)
    return Choice(registered, registered.component.options(**options))


def build(name: str, max_num_seqs: int, mixed_graph_tokens: int | None = None) -> Any:
    """An engine of the Triton parts over paged KV, self-check included; prefills up to so many tokens from graphs."""
    shape, quantizer = MODELS[name]
    catalogue, source = load_catalogue(), resolve_source(ModelSource(source=shape, weights="dummy"), Path("."))
    names = {**DEFAULT_PARTS, "attention": "triton", "kv": "paged", "quantizer": quantizer}
    given: dict[str, dict[str, Any]] = {
        "kv": {"block_size": 64},
        "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8192},
    }
    context = EngineContext(
        source=source,
        facts=read_model_facts(source, dtype="bfloat16", dummy=True),
        machine=machine_facts("cuda"),
        dtype="bfloat16",
        parts={role: choose(catalogue, role, names[role.value], **given.get(role.value, {})) for role in PART_ROLES},
        transforms=tuple(choose(catalogue, Role.TRANSFORM, each) for each in TRANSFORMS),
        max_model_len=2304,
        max_num_seqs=max_num_seqs,
        kv_memory_bytes=24 << 30,
        seed=0,
        clock_ns=time.perf_counter_ns,
    )
    native = choose(catalogue, Role.ENGINE, "native", mixed_graph_tokens=mixed_graph_tokens)
    return native.component.build(native.options, context)


def submit(engine: Any, count: int, length: int, new: int) -> None:
    for number in range(count):
        ids = torch.randint(10, TOKEN_IDS, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=tuple(ids), sampling=sampling))


def decode_row(engine: Any, batch: int) -> dict[str, float]:
    """Milliseconds of a decode step at a context of about `CONTEXT` tokens."""
    engine.reset()
    submit(engine, batch, CONTEXT - WARM_STEPS, STEPS + 4 * WARM_STEPS + 2 * batch)
    produced = dict.fromkeys(map(str, range(batch)), 0)
    while min(produced.values()) < WARM_STEPS:
        for event in engine.step():
            produced[event.request_id] += len(event.token_ids)
    times = []
    torch.cuda.synchronize()
    before = engine.report().counters["eager_steps"]
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    eager = engine.report().counters["eager_steps"] - before
    step_ms = 1e3 * sum(times) / len(times)
    return {"step_ms": step_ms, "graph_ms": graph_ms(engine, batch), "eager_steps": eager}


def graph_ms(engine: Any, batch: int) -> float:
    """The bare replay of the step's graph: its last metadata stay in place."""
    step = engine._runner.graphs.find(batch, 1, CONTEXT + 2 * STEPS)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(STEPS):
        step.graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / STEPS


def prefill_row(engine: Any, batch: int, length: int) -> dict[str, float]:
    """Prompt tokens per second until every first token is on the host; the median of seven."""
    rates = []
    for _ in range(9):
        engine.reset()
        submit(engine, batch, length, 1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        rates.append(batch * length / (time.perf_counter() - start))
    return {"tokens_per_s": statistics.median(rates[2:]), "best": max(rates)}


def host_profile(engine: Any) -> str:
    """Where the host spends the steps of 64 decoding sequences, by cumulative time."""
    import cProfile
    import io
    import pstats

    engine.reset()
    submit(engine, 64, 32, 80)
    for _ in range(8):
        engine.step()
    profile = cProfile.Profile()
    profile.runcall(lambda: [engine.step() for _ in range(64)])
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
    return text.getvalue()


def measure(name: str, profile: bool, mixed_graph_tokens: int | None) -> dict[str, Any]:
    engine = build(name, max(BATCHES), mixed_graph_tokens)
    rows: dict[str, Any] = {}
    for batch in BATCHES:
        rows[f"decode {batch}"] = decode_row(engine, batch)
    for batch, length in PREFILLS:
        rows[f"prefill {batch}x{length}"] = prefill_row(engine, batch, length)
    if profile:
        print(host_profile(engine))
    report = engine.report()
    facts = {"setup_s": report.setup_s, "graphs": report.graphs, "weight_bytes": report.weight_bytes,
             "transforms": report.executed["transforms"]}  # fmt: skip
    engine.close()
    return {"rows": rows, **facts}


def show(name: str, measured: dict[str, Any], copy: float) -> None:
    setup = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in measured["setup_s"].items())
    print(
        f"\n{name}: weights {measured['weight_bytes'] / copy * 1e3:.3f} ms at the copy bandwidth; set-up s: {setup}"
    )
    print(f"  graphs {measured['graphs']}")
    print(f"  {'row':16} {'measured':>10} {'replay':>8} {'stated':>9} {'stretch':>9}  verdict")
    for row, figures in measured["rows"].items():
        stated, stretch = STATED.get(name, {}).get(row, (float("nan"), float("nan")))
        if row.startswith("decode"):
            value, replay, met = figures["step_ms"], f"{figures['graph_ms']:.3f}", figures["step_ms"] <= stated
        else:
            value, replay, met = figures["tokens_per_s"], "", figures["tokens_per_s"] >= 0.95 * stated
        verdict = "" if stated != stated else "met" if met else "MISSED"
        eager = f"  eager steps: {figures['eager_steps']:.0f}" if figures.get("eager_steps") else ""
        print(f"  {row:16} {value:10.3f} {replay:>8} {stated:9.2f} {stretch:9.2f}  {verdict}{eager}")


def show_gains(results: dict[str, Any]) -> None:
    """Rows of quantized engines against the bf16 engine of the same run."""
    if "8b" not in results:
        return
    plain = results["8b"]["rows"]
    for name in results.keys() & LEAST_GAIN.keys():
        gains = {row: gain(row, figures, plain[row]) for row, figures in results[name]["rows"].items()}
        results[name]["times_bf16"] = gains
        for row, times in gains.items():
            least = LEAST_GAIN[name].get(row)
            verdict = "" if least is None else f"  wanted {least}: {'met' if times >= least else 'MISSED'}"
            print(f"  {name:8} {row:16} {times:6.3f} times bf16{verdict}")


def gain(row: str, figures: dict[str, float], plain: dict[str, float]) -> float:
    if row.startswith("decode"):
        return plain["step_ms"] / figures["step_ms"]
    return figures["tokens_per_s"] / plain["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--profile", action="store_true", help="show where the host spends decode steps")
    parser.add_argument(
        "--mixed-graph-tokens", type=int, help="largest prefill that is replayed from a graph; default: the engine's"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a CUDA device is needed")
    ceilings = measure_ceilings("cuda")
    copy = ceilings.copy_bytes_per_s or float("nan")
    flops = ceilings.matmul_flops_per_s["bfloat16"]
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s, bf16 matmul {flops / 1e12:.0f} TFLOP/s")
    results: dict[str, Any] = {"copy_bytes_per_s": copy, "matmul_flops_per_s": ceilings.matmul_flops_per_s}
    for name in given.only.split(","):
        results[name] = measure(name, given.profile, given.mixed_graph_tokens)
        show(name, results[name], copy)
        show_gains({key: results[key] for key in results.keys() & {"8b", name}})
        torch.cuda.empty_cache()
        if given.json:
            given.json.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
