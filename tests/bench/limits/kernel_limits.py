"""Every kernel row of the table of limits on one GPU: ours against targets, with ceilings and peers in the same run.

    PYTHONPATH=kernels[:site with vLLM][:site with FlashInfer] python tests/bench/limits/kernel_limits.py \
        --out kernels.json [--only "decode" "linears W4A16*"] [--resume] [--tables FOLDER [--tune 64 512]]

Needs torch and triton; vLLM (FA3, Marlin, Machete, CUTLASS), FlashInfer and bitsandbytes (NF4) take part where they
can be imported, and what fails is recorded and passed over. Each contender is checked against a higher precision
before it is timed; a wrong one gets no figure. Medians over replays of CUDA graphs, except many rows of small
operators (`do_bench`, which flushes the L2 cache). Results are saved after every contender, so that a run which was
cut short goes on with `--resume`.

With `--tables`, contenders `ours tuned` use the launch parameters measured there; `--tune M ...` measures them first
for these row counts (minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from infermix_kernels.attention_tune import ModelShape
from infermix_kernels.launch import LaunchTable
from infermix_kernels.tune import TuneShapes, tune_all

sys.path.insert(0, str(Path(__file__).parent))
import kernel_attention
import kernel_linears
import kernel_small
from kernel_timing import DEVICE, DTYPE, GPU, Ceilings, Measured, Sheet, ceilings, line


def main() -> None:
    given = _arguments()
    out = Path(given.out)
    before = json.loads(out.read_text()) if given.resume and out.exists() else {"rows": []}
    kept = [Measured(**row) for row in before["rows"] if row["failure"] is None]
    limits = ceilings()
    print(f"copy {limits.copy / 1e9:.0f} GB/s, matmul {limits.matmul / 1e12:.0f} TFLOP/s", flush=True)
    sheet = Sheet(
        lambda each: _save(out, each, limits),
        tuple(given.only),
        frozenset((row.row, row.contender) for row in kept),
        list(kept),
    )
    tables = None if given.tables is None else Path(given.tables)
    if tables is not None and given.tune:
        _tune(tables, tuple(given.tune), tuple(given.families))
    launches = None if tables is None else LaunchTable(tables, DEVICE)
    kernel_small.one_row(sheet)
    kernel_small.many_rows(sheet, limits)
    kernel_attention.decode_rows(sheet, limits, launches)
    kernel_attention.quantized_rows(sheet, limits, launches)
    kernel_attention.prefill_rows(sheet, limits, launches)
    kernel_linears.linear_rows(sheet, limits, tables)
    _save(out, sheet, limits)
    print(f"\n{len(sheet.rows)} figures; ours:")
    for row in sheet.rows:
        if row.of_target is not None:
            print(line(row))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="kernel_limits.json", help="the JSON file")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help="patterns or parts of row names")
    parser.add_argument("--resume", action="store_true", help="keep the figures that --out has, measure the rest")
    parser.add_argument("--tables", help="folder of measured launch parameters")
    parser.add_argument("--tune", nargs="*", type=int, metavar="M", help="row counts of linears to measure first")
    families = ["w4a16", "int8", "fp8", "attention"]
    parser.add_argument("--families", nargs="*", default=families, help="what --tune covers")
    return parser.parse_args()


def _tune(folder: Path, rows: tuple[int, ...], families: tuple[str, ...]) -> None:
    linears = tuple(family for family in families if family != "attention")
    if linears:
        kernel_linears.tune_linears(folder, rows, linears)
    if "attention" not in families:
        return
    sizes: dict[str, Any] = {
        "num_heads": kernel_attention.HEADS, "num_kv_heads": kernel_attention.KV_HEADS,
        "key_dim": kernel_attention.DIM, "value_dim": kernel_attention.DIM, "dtype": DTYPE,
    }  # fmt: skip
    kinds = (None, torch.int8, torch.float8_e4m3fn)
    models = [ModelShape(block_size=block, kv_dtype=kv, **sizes) for block in kernel_attention.BLOCKS for kv in kinds]
    report = tune_all(
        TuneShapes(attention=models), folder, DEVICE, lambda name, done: print(f"  {done:4.0%} {name}", flush=True)
    )
    entries = json.loads(report.files[0].read_text())["entries"]
    for key, entry in sorted(entries.items()):
        print(f"tuned {key}: {entry}", flush=True)


def _save(out: Path, sheet: Sheet, limits: Ceilings) -> None:
    content = {"environment": _environment(), "ceilings": asdict(limits), "rows": sheet.dump()}
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, out)


def _environment() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    for name in ("vllm", "flashinfer"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", "unknown"))
    device = torch.cuda.get_device_name() if GPU else "interpreter"
    return {"device": device, "cuda": torch.version.cuda, "versions": versions, "command": sys.argv[1:]}


if __name__ == "__main__":
    main()
