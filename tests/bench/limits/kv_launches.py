"""The best launch parameters of decode attention over each KV layout and block size, from a few candidates.

    PYTHONPATH=kernels python tests/bench/limits/kv_launches.py --json kv_launches.json
        [--kv int8 fp8 int4 int2 latent16 latent128] [--blocks 16 64 128] [--batch 64] [--context 8192]
        [--workers 12]

Needs torch and triton alone. Kernels are compiled by several processes first, because that takes longer than to
measure them; then each candidate is checked against fp32 and timed in a CUDA graph. The last lines say, for each kind
and block size, the fastest launch with its bytes per second, and its speed over bf16 keys and values of the Llama
shape (of latent rows too, which are another model's).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import kv_works
from infermix_kernels.attention import Workspace
from infermix_kernels.launch import Launch
from kernel_timing import DEVICE, GPU, graph_seconds

#: Query rows, tokens, warps, stages, programs a multiprocessor, registers of a thread (0: as the compiler likes).
#: `None` is what the kernel takes on its own.
EIGHT_BITS: tuple[tuple[int, ...] | None, ...] = (
    None,
    (16, 64, 2, 3, 4, 0),
    (16, 64, 2, 4, 4, 200),
    (16, 64, 2, 3, 8, 0),
    (16, 64, 2, 3, 8, 200),
    (16, 64, 2, 2, 8, 168),
    (16, 64, 4, 3, 4, 0),
    (16, 64, 4, 4, 4, 128),
    (16, 64, 4, 3, 8, 128),
    (16, 128, 4, 2, 4, 0),
    (16, 128, 4, 2, 8, 0),
    (16, 128, 4, 3, 4, 0),
    (16, 128, 8, 3, 4, 0),
    (16, 32, 1, 4, 8, 0),
    (16, 32, 2, 4, 8, 0),
    (16, 32, 2, 5, 16, 128),
)
FEW_BITS: tuple[tuple[int, ...] | None, ...] = (
    None,
    (16, 32, 2, 3, 4, 0),
    (16, 32, 2, 4, 8, 0),
    (16, 32, 2, 4, 16, 128),
    (16, 32, 1, 3, 8, 0),
    (16, 32, 1, 3, 16, 168),
    (16, 32, 4, 3, 8, 0),
    (16, 32, 4, 4, 8, 128),
    (16, 16, 1, 4, 16, 0),
    (16, 64, 4, 3, 4, 0),
)
FEW_HEADS: tuple[tuple[int, ...] | None, ...] = (
    None,
    (16, 32, 4, 3, 2, 0),
    (16, 32, 8, 3, 2, 0),
    (16, 64, 4, 2, 2, 0),
    (16, 64, 8, 2, 2, 0),
    (16, 16, 4, 4, 2, 0),
    (16, 16, 4, 3, 4, 0),
)
MANY_HEADS: tuple[tuple[int, ...] | None, ...] = (
    None,
    (64, 32, 8, 2, 1, 0),
    (64, 64, 8, 2, 1, 0),
    (64, 16, 8, 4, 1, 0),
    (32, 32, 4, 2, 1, 0),
    (32, 32, 8, 2, 2, 0),
    (16, 32, 4, 2, 2, 0),
)
CANDIDATES = {
    "int8": EIGHT_BITS, "fp8": EIGHT_BITS, "int4": FEW_BITS, "int2": FEW_BITS, "latent16": FEW_HEADS,
    "latent128": MANY_HEADS,
}  # fmt: skip
#: Blocks are whole groups.
LEAST_BLOCK = {"int4": 32, "int2": 32}


@dataclass(frozen=True)
class Piece:
    """One kind of pool that every candidate reads."""

    kv: str
    block: int
    batch: int
    context: int

    def make(self) -> Any:
        return kv_works.make(self.kv, self.batch, self.context, self.block)


def build(job: tuple[Piece, tuple[int, ...] | None]) -> None:
    """Compile a candidate, in a process of its own: the code stays in Triton's cache on disk."""
    piece, wanted = job
    try:
        piece.make().ours(Workspace.allocate(DEVICE), launch=_launch(wanted))
    except Exception as failure:  # measured again, and said there
        print(f"  not compiled: {wanted}: {type(failure).__name__}", flush=True)


def _launch(wanted: tuple[Any, ...] | None) -> Launch | None:
    return None if wanted is None else Launch(*wanted)


def rows_of(piece: Piece, plain: float) -> Iterator[dict[str, Any]]:
    """A row for each candidate; `plain` seconds of the same work in bf16."""
    work, workspace = piece.make(), Workspace.allocate(DEVICE)
    for wanted in CANDIDATES[piece.kv]:
        row: dict[str, Any] = {"kv": piece.kv, "block": piece.block, "launch": wanted}
        call = partial(work.ours, workspace, launch=_launch(wanted))
        try:
            error = work.error(call())
            if not error < 2e-2:
                raise ArithmeticError(f"wrong: error {error:.2e}")
            seconds = graph_seconds([call])
        except Exception as failure:  # one launch that does not fit must not end the search
            yield {**row, "failure": f"{type(failure).__name__}: {str(failure).strip()[:120]}"}
            continue
        rate = work.num_bytes / seconds
        yield {**row, "us": seconds * 1e6, "gb_per_s": rate / 1e9, "times_bf16": plain / seconds, "error": error}


def plain_seconds(batch: int, context: int, block: int) -> float:
    work = Piece("bf16", block, batch, context).make()
    return graph_seconds([partial(work.ours, Workspace.allocate(DEVICE))])


def shown(row: dict[str, Any]) -> str:
    name = f"{row['kv']:<9} block {row['block']:<4} {row['launch'] or 'default'!s:<26}"
    if "failure" in row:
        return f"{name} FAILED {row['failure']}"
    return f"{name} {row['us']:8.1f} us {row['gb_per_s']:7.0f} GB/s {row['times_bf16']:6.3f} x bf16"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--kv", nargs="+", choices=CANDIDATES, default=["int8"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile; 0: none")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    pieces = [
        Piece(kv, block, given.batch, given.context)
        for block in given.blocks
        for kv in given.kv
        if block >= LEAST_BLOCK.get(kv, 0)
    ]
    if GPU and given.workers:
        jobs = [(piece, wanted) for piece in pieces for wanted in CANDIDATES[piece.kv]]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
            wait([pool.submit(build, job) for job in jobs])  # a compiler that aborts breaks the pool, no more
    rows: list[dict[str, Any]] = []
    for piece in pieces:
        plain = plain_seconds(given.batch, given.context, piece.block)
        for row in rows_of(piece, plain):
            rows.append(row)
            print(shown(row), flush=True)
        if GPU:
            torch.cuda.empty_cache()
    print("best:")
    for piece in pieces:
        own = [row for row in rows if (row["kv"], row["block"]) == (piece.kv, piece.block) and "us" in row]
        print(shown(min(own, key=lambda row: row["us"])) if own else f"{piece}: none works", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
