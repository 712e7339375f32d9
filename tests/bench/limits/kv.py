"""KV rows of the table of limits: swapping, the cost of paging, and a cached prefix; 8B shape, random weights.

    python tests/bench/limits/kv.py --out kv_rows.json [--rows copies swap paging prefix] [--prefix-layout NAME]

Needs a GPU and this repository's three roots on the path. The ceilings are measured in the same run:

- copies: 1 GiB between pinned host memory and the device, each way, and a copy on the device; median of 9, timed by
  device events;
- swap: `BlockSwapper` over a paged layout, sequences of 1,024 and 8,192 tokens, their blocks scattered in the pool;
  bytes over the time that the copies took on their stream (gathering and scattering included), against the copies;
  `scattered` has scattered host blocks as well. The stall is how long a step behind a swap-out had to wait;
- paging: decode attention of the Triton kernel through block tables against dense rows, replayed from a graph over
  different data, median of 9; one ratio per shape;
- prefix: time to the first token of a prompt of 8,192 + 64 tokens, the first time and after the 8,192 were seen.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from infermix.commands.arguments import parse_options
from infermix.cost.kv import kv_groups
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.measure.clock import now_ns
from infermix.plugins import load_catalogue
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext
from infermix.roles.kv_space import BlockMoves, KVBudget
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource
from infermix.toolkit.block_swapper import BlockSwapper
from infermix.toolkit.host_blocks import with_host_blocks

ROWS = ("copies", "swap", "paging", "prefix")
COPY_BYTES, REPEATS = 1 << 30, 9
SWAP_TOKENS = (1024, 8192)
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
DECODE = ((64, 4096), (64, 1024), (8, 8192), (1, 32768))
PREFIX_TOKENS, TAIL_TOKENS = 8192, 64


def seconds_of(work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Median time of `work` on the device; the first call only warms up."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def copies() -> dict[str, float]:
    """Bytes/s of pinned copies each way; a device copy counts read and write."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device, other = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return {
        "d2h_bytes_per_s": COPY_BYTES / seconds_of(lambda: host.copy_(device, non_blocking=True)),
        "h2d_bytes_per_s": COPY_BYTES / seconds_of(lambda: device.copy_(host, non_blocking=True)),
        "device_bytes_per_s": 2 * COPY_BYTES / seconds_of(lambda: other.copy_(device)),
    }


def swap_rows(ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    layout, facts = _layout("paged", block_size=BLOCK), _facts()
    shape = layout.shape(kv_groups(facts), KVBudget(8, max(SWAP_TOKENS), 2))
    shape = with_host_blocks(shape, 4 << 30)
    swapper = BlockSwapper(layout.store(shape, "cuda", torch.bfloat16), shape, torch.device("cuda"), now_ns)
    order = random.Random(0)
    for tokens in SWAP_TOKENS:
        for scattered in (False, True):
            figures = _swapped(swapper, _moves(shape, tokens, order, scattered))
            setting = {"row": "swap", "tokens": tokens, "scattered_host": scattered}
            yield {**setting, **figures, **_shares(figures, ceilings)}


def _moves(shape: Any, tokens: int, order: random.Random, scattered: bool) -> tuple[BlockMoves, BlockMoves]:
    """Out and back in, device blocks in random order."""
    count = -(-tokens // shape.block_size)
    device = tuple(order.sample(range(shape.num_blocks), count))
    host = tuple(order.sample(range(shape.host_blocks[0]), count)) if scattered else tuple(range(count))
    return BlockMoves(0, True, (device,), (host,)), BlockMoves(0, False, (device,), (host,))


def _swapped(swapper: BlockSwapper, moves: tuple[BlockMoves, BlockMoves]) -> dict[str, float]:
    """Medians over repeats, and the wall clock of one way out, the host's work included."""
    found: list[dict[str, float]] = []
    for _ in range(REPEATS + 1):
        swapper.reset()
        torch.cuda.synchronize()
        begin = now_ns()
        swapper.execute(moves[:1])
        launched = now_ns()
        torch.cuda.synchronize()
        out = now_ns()
        stall = swapper.counters()["swap_stall_s"]
        swapper.execute(moves[1:])
        swapper.wait_for([0])
        torch.cuda.synchronize()
        figures = swapper.counters()
        found.append(
            {
                "bytes": figures["swap_out_bytes"],
                "out_bytes_per_s": figures["swap_out_bytes_per_s"],
                "in_bytes_per_s": figures["swap_in_bytes_per_s"],
                "out_stall_s": stall,
                "out_launch_s": (launched - begin) / 1e9,
                "out_wall_s": (out - begin) / 1e9,
                "in_wall_s": (now_ns() - out) / 1e9,
            }
        )
    return {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}


def _shares(figures: dict[str, float], ceilings: dict[str, float]) -> dict[str, float]:
    return {
        "out_share": figures["out_bytes_per_s"] / ceilings["d2h_bytes_per_s"],
        "in_share": figures["in_bytes_per_s"] / ceilings["h2d_bytes_per_s"],
    }


def paging_rows(ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    for batch, context in DECODE:
        dense = _attention_seconds(batch, context, paged=False)
        for block_size in (16, 64):
            paged = _attention_seconds(batch, context, paged=True, block_size=block_size)
            read = batch * context * KV_HEADS * DIM * 2 * 2
            yield {
                "row": "paging", "batch": batch, "context": context, "block_size": block_size, "dense_s": dense,
                "paged_s": paged, "cost_of_paging": paged / dense - 1, "paged_bytes_per_s": read / paged,
                "dense_bytes_per_s": read / dense, "device_bytes_per_s": ceilings["device_bytes_per_s"],
            }  # fmt: skip


def _attention_seconds(batch: int, context: int, paged: bool, block_size: int = BLOCK) -> float:
    """Per call; calls rotate over data that is larger than the cache together."""
    from infermix_kernels.attention import Workspace, paged_attention

    copies = max(2, min(8, (4 << 30) // (batch * context * KV_HEADS * DIM * 4)))
    size = (copies * batch * context // block_size, block_size) if paged else (copies * batch, context)
    keys, values = (torch.randn(*size, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    order = torch.randperm(size[0], device="cuda").to(torch.int32)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    contexts = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    workspace = Workspace.allocate("cuda")
    calls = []
    for number in range(copies):
        q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        rows = slice(number * batch, (number + 1) * batch)
        width = context // block_size
        tables = order[number * batch * width :][: batch * width].view(batch, width) if paged else None
        pools = (keys, values) if paged else (keys[rows], values[rows])
        calls.append(
            partial(
                paged_attention,
                q,
                *pools,
                cu_seqlens_q=starts,
                context_lens=contexts,
                block_tables=tables,
                scale=DIM**-0.5,
                max_query_len=1,
                max_context_len=context,
                out=torch.empty_like(q),
                workspace=workspace,
            )
        )
    return seconds_of(_graph(calls)) / copies


def _graph(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def prefix_row(layout: str) -> dict[str, Any]:
    engine = _engine(layout)
    draw = random.Random(0)
    cold, warm = [], []
    for _ in range(4):
        prefix = tuple(draw.randrange(10, 120_000) for _ in range(PREFIX_TOKENS))
        cold.append(_first_token_s(engine, prefix, draw))
        warm.append(_first_token_s(engine, prefix, draw))
    counters = {name: value for name, value in engine.report().counters.items() if "prefix" in name}
    assert counters.get("prefix_hits") == len(warm), f"the prefix was not found every time: {counters}"
    engine.close()
    first, again = statistics.median(cold[1:]), statistics.median(warm[1:])
    return {
        "row": "prefix", "layout": layout, "uncached_ttft_s": first, "cached_ttft_s": again, "ratio": again / first,
        **counters,
    }  # fmt: skip


def _first_token_s(engine: Any, prefix: tuple[int, ...], draw: random.Random) -> float:
    tail = tuple(draw.randrange(10, 120_000) for _ in range(TAIL_TOKENS))
    sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
    torch.cuda.synchronize()
    begin = now_ns()
    engine.submit(Request(request_id="one", prompt_ids=(*prefix, *tail), sampling=sampling))
    first = None
    while engine.has_work:
        if engine.step() and first is None:
            first = now_ns()
    assert first is not None
    return (first - begin) / 1e9


def _layout(name: str, **options: Any) -> Any:
    component = load_catalogue().find(Role.KV, name).component
    return component.build(component.options(**options), None)


def _source() -> Any:
    """The 8B shape with more positions than it has, so that a prefix of 8,192 tokens leaves room for a tail."""
    config = {"max_position_embeddings": 2 * PREFIX_TOKENS}
    return resolve_source(ModelSource(source="shape:llama-3-8b", weights="dummy", config=config), Path())


def _facts() -> Any:
    return read_model_facts(_source(), dtype="bfloat16", dummy=True)


def _engine(layout: str) -> Any:
    """`layout` as `NAME:OPTION=VALUE,...`."""
    catalogue = load_catalogue()

    def choose(role: Role, text: str) -> Choice:
        name, _, options = text.partition(":")
        registered = catalogue.find(role, name)
        return Choice(registered, registered.component.options(**parse_options(options, "--prefix-layout")))

    names = {**DEFAULT_PARTS, "attention": "triton", "kv": layout}
    context = EngineContext(
        source=_source(),
        facts=_facts(),
        machine=machine_facts("cuda"),
        dtype="bfloat16",
        parts={role: choose(role, names[role.value]) for role in PART_ROLES},
        max_model_len=PREFIX_TOKENS + TAIL_TOKENS + 64,
        max_num_seqs=2,
        seed=0,
        clock_ns=now_ns,
    )
    native = choose(Role.ENGINE, "native")
    return native.component.build(native.options, context)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--prefix-layout", default="paged:prefix_cache=radix", help="NAME:OPTION=VALUE,...")
    args = parser.parse_args()
    ceilings = copies()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ceilings": ceilings}
    found["rows"] = rows = []
    for make in (swap_rows, paging_rows):
        if make.__name__.removesuffix("_rows") in args.rows:
            for row in make(ceilings):
                print(json.dumps(row), flush=True)
                rows.append(row)
                torch.cuda.empty_cache()
    if "prefix" in args.rows:
        rows.append(prefix_row(args.prefix_layout))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(ceilings))
    args.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
