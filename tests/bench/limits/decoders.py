"""What decoders cost on one GPU: a verification forward, synthetic acceptance, their own Python. Random weights.

    python tests/bench/limits/decoders.py --json decoders.json [--only verification,speedup,overhead]
        [--decoders lookahead,medusa,...]

`verification`: a step of 8 tokens against a step of 1, 8B shape, one sequence, both replayed from graphs. `speedup`:
`synthetic_acceptance` at 3.0 tokens per forward against plain decoding, the two engines in turns. `overhead`: time in
`launch` and `collect` of a decoder outside of forwards, sampling and waiting for the device, for 1 and 64 sequences
(`decoder_overhead.py`); heads are random, constraints are JSON over a made-up vocabulary, where xgrammar is there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decoder_overhead import DECODERS, REPLAYING, OwnTime, constrain, write_random_heads
from engine import TRANSFORMS, choose
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.plugins import load_catalogue
from infermix.roles.component import PART_ROLES, Role
from infermix.roles.engine import EngineContext
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource

CONTEXT, REPLAYS, ROUNDS = 1024, 100, 5
NUM_DRAFTS, TOKENS_PER_FORWARD = 7, 3.0
#: Most a step of 8 tokens may take of a step of 1; least gain at 3.0 tokens per forward; most milliseconds of Python.
MOST_VERIFICATION, LEAST_SPEEDUP, MOST_OVERHEAD_MS = 1.15, 2.3, {1: 0.3, 64: 1.0}


def build(
    model: str,
    device: str,
    decoder: tuple[str, dict[str, Any]],
    max_num_seqs: int,
    kv_bytes: int,
    graphs: str = "auto",
    base: Path | None = None,
) -> Any:
    """The Triton parts over paged KV on a GPU; the plain ones elsewhere, to try this script."""
    catalogue, on_gpu = load_catalogue(), device == "cuda"
    dummy = model.startswith("shape:")
    source = resolve_source(ModelSource(source=model, weights="dummy" if dummy else "auto"), Path("."))
    dtype = "bfloat16" if on_gpu else "float32"
    names = {**DEFAULT_PARTS, "kv": "paged", "attention": "triton" if on_gpu else "sdpa", "decoder": decoder[0]}
    rows = decoder[1].get("num_beams", 1)
    given = {
        "kv": {"block_size": 64},
        "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8192},
        "decoder": decoder[1],
    }
    context = EngineContext(
        source=source, facts=read_model_facts(source, dtype=dtype, dummy=dummy), machine=machine_facts(device),
        dtype=dtype,
        parts={role: choose(catalogue, role, names[role.value], **given.get(role.value, {})) for role in PART_ROLES},
        transforms=tuple(choose(catalogue, Role.TRANSFORM, each) for each in TRANSFORMS) if on_gpu else (),
        max_model_len=min(2304, read_model_facts(source, dtype=dtype, dummy=dummy).max_position_embeddings),
        max_num_seqs=max_num_seqs * rows, kv_memory_bytes=kv_bytes if on_gpu else None, seed=0,
        clock_ns=time.perf_counter_ns, find=catalogue.find, base=base,
    )  # fmt: skip
    native = choose(catalogue, Role.ENGINE, "native", graphs=graphs)
    return native.component.build(native.options, context)


def submit(engine: Any, count: int, length: int, new: int, seed: int = 0) -> None:
    """Prompts that repeat phrases, so that what looks for them finds some."""
    vocabulary = min(engine._context.facts.vocab_size, 30000)
    for number in range(count):
        rng = random.Random(number)
        phrase = [rng.randrange(10, vocabulary) for _ in range(23)]
        prompt = tuple((phrase * (length // 23 + 1))[:length])
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True, seed=seed + number)
        engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=sampling))


def run_until(engine: Any, count: int, tokens: int) -> None:
    """Step until each of `count` sequences has `tokens` new tokens."""
    seen = dict.fromkeys(map(str, range(count)), 0)
    while engine.has_work and min(seen.values()) < tokens:
        for event in engine.step():
            seen[event.request_id] += len(event.token_ids)


def replay_ms(engine: Any, query_len: int, context: int) -> float:
    """The bare replay of a step's graph: the metadata of its last launch stay in place."""
    step = engine._runner.graphs.find(1, query_len, context)
    samples = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(REPLAYS):
            step.graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / REPLAYS)
    return statistics.median(samples)


def verification(plain: Any, drafting: Any) -> dict[str, float]:
    for engine in (plain, drafting):
        engine.reset()
        submit(engine, 1, CONTEXT, 200)
        run_until(engine, 1, 24)
    one, eight = replay_ms(plain, 1, CONTEXT + 32), replay_ms(drafting, NUM_DRAFTS + 1, CONTEXT + 64)
    return {"one_ms": one, "eight_ms": eight, "ratio": eight / one, "most": MOST_VERIFICATION}


def decode_rate(engine: Any, length: int, new: int, seed: int) -> float:
    """Output tokens per second of one sequence, its prompt not counted."""
    engine.reset()
    submit(engine, 1, length, new, seed)
    run_until(engine, 1, 1)
    start, done = time.perf_counter(), 0
    while engine.has_work:
        done += sum(len(event.token_ids) for event in engine.step())
    return done / (time.perf_counter() - start)


def speedup(plain: Any, drafting: Any, length: int, new: int) -> dict[str, Any]:
    """Ratios of turns that are taken in the order A B B A, each with another seed; the first is not counted.

    `ratio` is for what the coins of these seeds gave, `tokens_per_forward`; `ratio_at_stated` scales it to the mean.
    """
    turns = []
    for turn in range(ROUNDS + 1):
        order = (plain, drafting) if turn % 2 == 0 else (drafting, plain)
        found = {id(engine): decode_rate(engine, length, new, turn) for engine in order}
        counters = drafting.report().counters
        length_of_turn = counters["verified_tokens"] / counters["verifications"]
        turns.append((found[id(plain)], found[id(drafting)], length_of_turn, counters["eager_steps"]))
    plain_rate, drafting_rate, tokens, eager = (statistics.median(each) for each in zip(*turns[1:], strict=True))
    ratios = [drafted / alone for alone, drafted, _, _ in turns[1:]]
    scaled = [TOKENS_PER_FORWARD * drafted / (alone * mean) for alone, drafted, mean, _ in turns[1:]]
    return {
        "plain_tokens_per_s": plain_rate, "drafting_tokens_per_s": drafting_rate, "tokens_per_forward": tokens,
        "ratio": statistics.median(ratios), "ratio_at_stated": statistics.median(scaled), "ratios": ratios,
        "least": LEAST_SPEEDUP, "eager_steps": eager,
    }  # fmt: skip


def overhead(engine: Any, device: str, count: int, steps: int) -> dict[str, float]:
    """Milliseconds of a decoder's own Python in one step."""
    engine.reset()
    submit(engine, count, 64, 400 if device == "cuda" else 60)
    for _ in range(8):
        engine.step()
    own, samples = OwnTime(engine), []
    for _ in range(steps):
        if not engine.has_work:
            break
        before = own()
        engine.step()
        samples.append(1e3 * (own() - before))
    own.detach()
    figures = {"median_ms": statistics.median(samples), "least_ms": min(samples), "worst_ms": max(samples)}
    return {**figures, "most_ms": MOST_OVERHEAD_MS[count]}


def pair(model: str, device: str) -> tuple[Any, Any]:
    options = {"num_draft_tokens": NUM_DRAFTS, "tokens_per_forward": TOKENS_PER_FORWARD}
    drafting = ("synthetic_acceptance", options)
    return build(model, device, ("autoregressive", {}), 1, 2 << 30), build(model, device, drafting, 1, 2 << 30)


def show(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        figures = ", ".join(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float | int))
        print(f"  {name:36} {figures}", flush=True)


def overhead_rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One engine for both numbers of sequences: loading one takes longer than the steps."""
    source = resolve_source(ModelSource(source=given.small, weights="dummy"), Path("."))
    facts = read_model_facts(source, dtype="bfloat16", dummy=True)
    with tempfile.TemporaryDirectory() as base:
        write_random_heads(Path(base), facts.hidden_size, facts.vocab_size)
        for name in given.decoders.split(","):
            # Forwards are not what is timed, so nothing is captured but with decoders that have graphs of their own.
            graphs = "auto" if name in REPLAYING else "off"
            engine = build(given.small, given.device, DECODERS[name], 64, 8 << 30, graphs, Path(base))
            if name == "constrained":
                constrain(engine)
            if hasattr(engine._decoder, "_uniform"):
                engine._decoder._uniform = True  # also on a CPU: the steps that a GPU would replay
            for count in MOST_OVERHEAD_MS:
                yield {f"overhead {name} {count}": overhead(engine, given.device, count, given.steps)}
            engine.close()


def speed_rows(given: argparse.Namespace, asked: Seq[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    engines = pair(given.model, given.device)
    if "verification" in asked and given.device == "cuda":
        rows["verification 8 against 1"] = verification(*engines)
    if "speedup" in asked:
        rows["speedup at 3.0"] = speedup(*engines, *((CONTEXT, 1024) if given.device == "cuda" else (16, 60)))
    for engine in engines:
        engine.close()
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--only", default="verification,speedup,overhead")
    measurable = [name for name in DECODERS if name != "constrained" or find_spec("xgrammar")]
    parser.add_argument("--decoders", default=",".join(measurable), help="of the overhead rows")
    parser.add_argument("--steps", type=int, default=32, help="timed for each overhead row")
    parser.add_argument("--model", default="shape:llama-3-8b")
    parser.add_argument("--small", default="shape:smollm2-135m", help="model of the overhead rows")
    parser.add_argument("--device", default="cuda", help="cpu tries the script on a tiny --model and --small")
    given = parser.parse_args()
    unknown = set(given.decoders.split(",")) - set(DECODERS)
    if unknown:
        parser.error(f"--decoders {', '.join(sorted(unknown))}: expected some of {', '.join(DECODERS)}")
    return given


def main() -> None:
    given = arguments()
    asked = given.only.split(",")
    rows: dict[str, Any] = {}
    if {"verification", "speedup"} & set(asked):
        rows |= speed_rows(given, asked)
        show(rows)
    if "overhead" in asked:
        for row in overhead_rows(given):
            show(row)
            rows |= row
    if given.json:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        given.json.write_text(json.dumps({"device": name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
