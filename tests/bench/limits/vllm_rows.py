"""vLLM alone, for the table of limits: decode step, prefill and offline throughput of two shapes with random weights.

    python tests/bench/limits/vllm_rows.py --out vllm_rows.json [--models llama-3-8b smollm2-135m] [--rows decode]

Needs a GPU, vLLM, and this repository's `harness` on the path. Every model runs in a process of its own; the ceilings
of the machine are measured in the same run. How the figures are made:

- decode: all sequences have prompts of 1024 tokens and have emitted at least 16 tokens; the mean of the next 96 steps
  of vLLM's engine (`LLM.llm_engine.step`, one token per sequence and step, sampled ids on the host), median of 3;
- prefill: from the first `add_request` until every sequence has its first token, median of 5;
- offline: `LLM.generate` of 128 prompts of 512 tokens with 128 new ones each, output tokens per second, median of 3.

Prompts are random and never repeat, prefix caching is off, and vLLM's core lives in the measured process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infermix.cost.model_facts import read_model_facts
from infermix.cost.roofline import decode_cost, prefill_cost
from infermix.cost.source import resolve_source
from infermix.measure.clock import now_ns
from infermix.spec.experiment import ModelSource

MODELS = ("llama-3-8b", "smollm2-135m")
ROWS = ("decode", "prefill", "offline")
#: Read by vLLM when it is imported.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
CONTEXT, SETTLE, STEPS = 1024, 16, 96
DECODE_BATCHES, PREFILL_BATCHES, PREFILL_TOKENS = (1, 8, 64), (1, 4), 2048
OFFLINE = (128, 512, 128)


class Measured:
    """One model inside one `LLM`, and rows of figures from it."""

    def __init__(self, name: str) -> None:
        from vllm import LLM, SamplingParams, __version__

        self.version, self._params = __version__, SamplingParams
        self.facts, config = read_shape(name)
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config))
        begin = now_ns()
        self.llm: Any = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
            dtype="bfloat16", max_model_len=4096, max_num_seqs=256, gpu_memory_utilization=0.85,
        )  # fmt: skip
        self.start_s = seconds_since(begin)
        self._random = random.Random(0)
        self._count = 0

    def rows(self, wanted: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        if "decode" in wanted:
            yield from (self._decode_row(batch) for batch in DECODE_BATCHES)
        if "prefill" in wanted:
            yield from (self._prefill_row(batch) for batch in PREFILL_BATCHES)
        if "offline" in wanted:
            yield self._offline_row(*OFFLINE)

    def _decode_row(self, batch: int) -> dict[str, Any]:
        repeats = [self._decode_step(batch) for _ in range(4)][1:]
        step_s = statistics.median(step for step, _ in repeats)
        context = round(statistics.mean(context for _, context in repeats))
        num_bytes = decode_cost(self.facts, context, batch).num_bytes
        return {
            "what": "decode", "batch": batch, "context": context, "step_ms": 1e3 * step_s,
            "samples_ms": [1e3 * step for step, _ in repeats], "bytes": num_bytes,
            "bytes_per_s": num_bytes / step_s,
        }  # fmt: skip

    def _decode_step(self, batch: int) -> tuple[float, float]:
        """Seconds per step and mean context, while all sequences run."""
        names = self._submit(batch, CONTEXT, max_tokens=SETTLE + 2 * STEPS + batch)
        lengths = dict.fromkeys(names, 0)
        while min(lengths.values()) < SETTLE:
            self._step(lengths)
        before, begin = sum(lengths.values()), now_ns()
        for _ in range(STEPS):
            self._step(lengths)
        elapsed, after = seconds_since(begin), sum(lengths.values())
        assert after - before == batch * STEPS, f"{after - before} tokens in {STEPS} steps of {batch} sequences"
        self._end(names)
        return elapsed / STEPS, CONTEXT + (before + after) / 2 / batch

    def _prefill_row(self, batch: int) -> dict[str, Any]:
        samples = [self._prefill(batch) for _ in range(7)][2:]
        elapsed = statistics.median(samples)
        flops = prefill_cost(self.facts, PREFILL_TOKENS, batch).flops
        return {
            "what": "prefill", "batch": batch, "context": PREFILL_TOKENS,
            "tokens_per_s": batch * PREFILL_TOKENS / elapsed, "samples_s": samples, "flops_per_s": flops / elapsed,
        }  # fmt: skip

    def _prefill(self, batch: int) -> float:
        prompts = [self._prompt(PREFILL_TOKENS) for _ in range(batch)]
        begin = now_ns()
        names = self._submit_prompts(prompts, max_tokens=1)
        lengths = dict.fromkeys(names, 0)
        while min(lengths.values()) < 1:
            self._step(lengths)
        elapsed = seconds_since(begin)
        self._end(names)
        return elapsed

    def _offline_row(self, count: int, prompt: int, new: int) -> dict[str, Any]:
        samples = [self._offline(count, prompt, new) for _ in range(4)][1:]
        return {
            "what": "offline", "batch": count, "context": prompt, "new_tokens": new, "samples_s": samples,
            "output_tokens_per_s": count * new / statistics.median(samples),
        }  # fmt: skip

    def _offline(self, count: int, prompt: int, new: int) -> float:
        prompts = [{"prompt_token_ids": self._prompt(prompt)} for _ in range(count)]
        params = self._sampling(new)
        begin = now_ns()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        elapsed = seconds_since(begin)
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return elapsed

    def _sampling(self, max_tokens: int, **more: Any) -> Any:
        return self._params(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **more)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(10, self.facts.vocab_size) for _ in range(length)]

    def _submit(self, batch: int, length: int, max_tokens: int) -> list[str]:
        return self._submit_prompts([self._prompt(length) for _ in range(batch)], max_tokens)

    def _submit_prompts(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        from vllm.sampling_params import RequestOutputKind

        names = []
        for prompt in prompts:
            self._count += 1
            names.append(f"row-{self._count}")
            params = self._sampling(max_tokens, output_kind=RequestOutputKind.DELTA)
            self.llm.llm_engine.add_request(names[-1], {"type": "token", "prompt_token_ids": prompt}, params)
        return names

    def _step(self, lengths: dict[str, int]) -> None:
        for output in self.llm.llm_engine.step():
            lengths[output.request_id] += len(output.outputs[0].token_ids)

    def _end(self, names: list[str]) -> None:
        """Abort what still runs, and let launched batches come back."""
        engine = self.llm.llm_engine
        engine.abort_request(names)
        for _ in range(3):
            engine.step()


def read_shape(name: str) -> tuple[Any, dict[str, Any]]:
    source = resolve_source(ModelSource(source=f"shape:{name}", weights="dummy"), Path())
    return read_model_facts(source, dtype="bfloat16", dummy=True), dict(source.config)


def seconds_since(begin_ns: int) -> float:
    return (now_ns() - begin_ns) / 1e9


def measure(name: str, wanted: tuple[str, ...], ceilings: dict[str, float], show: Callable[[str], None]) -> Any:
    """Everything of one model: its rows, with the ratio to the byte floor where bytes bind."""
    measured = Measured(name)
    found = []
    for row in measured.rows(wanted):
        if "bytes_per_s" in row:
            row["times_floor"] = ceilings["copy_bytes_per_s"] / row["bytes_per_s"]
        show(line(name, row))
        found.append(row)
    return {"model": name, "vllm": measured.version, "start_s": measured.start_s, "rows": found}


def line(name: str, row: dict[str, Any]) -> str:
    head = f"{name:14} {row['what']:8} B={row['batch']:<4} ctx={row['context']:<6}"
    if row["what"] == "decode":
        return f"{head} {row['step_ms']:8.3f} ms/step  {row['times_floor']:.2f} x byte floor"
    if row["what"] == "prefill":
        return f"{head} {row['tokens_per_s']:8,.0f} tok/s    {row['flops_per_s'] / 1e12:.0f} TFLOP/s"
    return f"{head} {row['output_tokens_per_s']:8,.0f} output tok/s"


def measure_limits() -> dict[str, float]:
    from infermix.measure.ceilings import measure_ceilings

    ceilings = measure_ceilings("cuda")
    assert ceilings.copy_bytes_per_s is not None
    return {
        "copy_bytes_per_s": ceilings.copy_bytes_per_s,
        "matmul_flops_per_s": ceilings.matmul_flops_per_s["bfloat16"],
    }


def in_own_process(name: str, rows: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "one.json"
        command = [sys.executable, __file__, "--one", name, "--out", str(out), "--rows", *rows]
        done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False)
        if done.returncode or not out.exists():
            return {"model": name, "error": f"ended with exit code {done.returncode}", "rows": []}
        return dict(json.loads(out.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        limits = measure_limits()
        found = measure(given.one, tuple(given.rows), limits, lambda text: print(text, flush=True))
        given.out.write_text(json.dumps({**found, "ceilings": limits}))
        return 0
    results: list[dict[str, Any]] = []
    for name in given.models:
        results.append(in_own_process(name, given.rows))
        given.out.write_text(json.dumps(results, indent=1))  # what is done survives a time limit
    for result in results:
        status = result.get("error") or f"started in {result['start_s']:.0f} s"
        print(f"{result['model']}: {status}")
        for row in result["rows"]:
            print(line(result["model"], row))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
