"""The attention kernels on a GPU: every shape against fp64, races, capture, refusals that read the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import TOLERANCE, Case, build, error, expected
from infermix_kernels.attention import Workspace, paged_attention
from infermix_kernels.launch import Launch, LaunchTable, ShapeClass
from infermix_kernels.tune import ModelShape, TuneShapes, tune_all
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
DECODE: dict[str, Any] = {"query_lens": (1,) * 5, "contexts": (1, 4097, 0, 777, 2048)}
PREFILL: dict[str, Any] = {"query_lens": (300, 1, 65, 128), "contexts": (300, 40, 1000, 128)}
VERIFY: dict[str, Any] = {"query_lens": (5, 8, 1), "contexts": (2000, 8, 333)}
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
BLOCKS = (16, 32, 64, 128, 256, 0, 24)


def _dims() -> list[Case]:
    cases = []
    for number, (dims, dtype) in enumerate((dims, dtype) for dims in DIMS for dtype in (BF16, FP16, FP32)):
        for kind, lens in (("decode", DECODE), ("prefill", PREFILL)):
            block = BLOCKS[(number + (kind == "decode")) % len(BLOCKS)]
            name = f"{kind} {dims} {dtype} block {block}"
            cases.append(Case(name, **lens, heads=(8, 2), dims=dims, dtype=dtype, block_size=block))
    return cases


def _heads() -> list[Case]:
    groups = ((32, 8), (12, 12), (28, 4), (9, 3), (71, 1), (16, 1))
    return [
        Case(f"{kind} heads {heads}", **lens, heads=heads, dims=(64, 64), dtype=BF16)
        for heads in groups
        for kind, lens in (("decode", DECODE), ("prefill", PREFILL), ("verify", VERIFY))
    ]


def _rules() -> list[Case]:
    extras: list[tuple[str, dict[str, Any]]] = [
        ("window", {"rules": {"window": 100}}),
        ("softcap", {"rules": {"softcap": 5.0}}),
        ("sinks", {"sinks": True}),
        ("all", {"rules": {"window": 100, "softcap": 5.0}, "sinks": True}),
    ]
    return [
        Case(f"{kind} {name}", **lens, heads=(8, 2), dims=(128, 128), dtype=BF16, **extra)
        for name, extra in extras
        for kind, lens in (("decode", DECODE), ("prefill", PREFILL))
    ]


def _special() -> list[Case]:
    common: dict[str, Any] = {"heads": (32, 8), "dims": (128, 128), "dtype": BF16}
    tree = [
        Case("tree", (16, 7), (900, 7), **common, tree=True),
        Case("tree of 64", (64, 33), (900, 2000), **common, tree=True),
        Case("tree int8", (16, 7), (900, 7), **common, tree=True, kv=INT8),
    ]
    quantized = [
        Case(f"{kind} {kv} block {block}", **lens, **common, kv=kv, block_size=block)
        for kv in (INT8, FP8)
        for kind, lens, block in (("decode", DECODE, 16), ("prefill", PREFILL, 64), ("verify", VERIFY, 0))
    ]
    return [
        *tree,
        *quantized,
        Case("int8 fp16 scales", **DECODE, **common, kv=INT8, scale_dtype=FP16),
        Case("int8 strided scales", **DECODE, **common, kv=INT8, scales_strided=True),
        Case("int8 dim 80", **DECODE, heads=(8, 2), dims=(80, 80), dtype=FP16, kv=INT8),
        Case("fp8 in fp32", **DECODE, heads=(8, 2), dims=(128, 64), dtype=FP32, kv=FP8),
        Case("one long sequence", (1,), (30000,), **common),
        Case("long chunk over a long context", (130,), (20000,), **common),
        Case("copy engine, blocks", **PREFILL, **common, block_size=64, launch=(128, 64, 8, 2, 1, 128, True)),
        Case("copy engine, dense", **PREFILL, **common, block_size=0, launch=(128, 64, 8, 2, 1, 128, True)),
        Case("decode, other tiles", **DECODE, **common, launch=(16, 32, 4, 4, 8)),
        Case("decode int8, other tiles", **DECODE, **common, kv=INT8, launch=(16, 64, 2, 3, 8)),
        Case("prefill, other tiles", **PREFILL, **common, launch=(64, 64, 4, 3, 1)),
        *(
            Case(f"{kind} latent {heads} heads {dtype}", **lens, heads=(heads, 1), dims=(576, 512), dtype=dtype,
                 block_size=block, shared=True)
            for heads, dtype, block in ((128, BF16, 64), (16, BF16, 16), (16, FP16, 24), (20, FP32, 0))
            for kind, lens in (("decode", DECODE), ("prefill", PREFILL), ("verify", VERIFY))
        ),
        Case("latent 448 + 64", **DECODE, heads=(40, 1), dims=(512, 448), dtype=BF16, shared=True, sinks=True),
        Case("latent tree", (16, 7), (900, 7), heads=(16, 1), dims=(576, 512), dtype=BF16, shared=True, tree=True),
        Case("many sequences", (1, 2, 3) * 50, tuple(range(3, 153)), **common),
    ]  # fmt: skip


def _ready(arguments: dict[str, Any], case: Case) -> dict[str, Any]:
    launch = Launch(*case.launch) if case.launch else None
    return {**arguments, "launch": launch, "workspace": Workspace.allocate("cuda")}


@pytest.mark.parametrize("case", [*_dims(), *_heads(), *_rules(), *_special()], ids=str)
def test_matches_fp64(case: Case) -> None:
    arguments = _ready(build(case, seed=len(case.name), device="cuda"), case)
    out = paged_attention(**arguments, check_block_tables=True)
    reference = expected({k: v for k, v in arguments.items() if k not in ("launch", "workspace")})
    assert error(out, reference) < TOLERANCE[case.dtype]
    padded = [row for row, context in enumerate(case.contexts) if context == 0]
    assert all(not out[row].any() for row in padded if max(case.query_lens) == 1)


def test_splits_give_the_same_bits_every_time() -> None:
    case = Case("repeat", (1,) * 3, (9000, 5, 4096), heads=(32, 8), dims=(128, 128), dtype=BF16)
    arguments = _ready(build(case, device="cuda"), case)
    first = paged_attention(**arguments).clone()
    for _ in range(200):
        arguments["out"].fill_(float("nan"))
        assert torch.equal(paged_attention(**arguments), first)


@pytest.mark.parametrize(
    "case",
    [
        Case("decode", **DECODE, heads=(8, 2), dims=(64, 64), dtype=BF16),
        Case("prefill", **PREFILL, heads=(32, 8), dims=(128, 128), dtype=BF16),
        Case("copy engine", **PREFILL, heads=(32, 8), dims=(128, 128), dtype=BF16, block_size=64),
        Case("int8", **VERIFY, heads=(8, 2), dims=(64, 64), dtype=BF16, kv=INT8),
        Case("sinks", **DECODE, heads=(8, 2), dims=(64, 64), dtype=BF16, sinks=True, rules={"window": 50}),
    ],
    ids=str,
)
def test_a_repeated_call_reads_its_own_tensors(case: Case) -> None:
    workspace = Workspace.allocate("cuda")
    for seed in range(3):
        arguments = build(case, seed=seed, device="cuda")
        out = paged_attention(**arguments, workspace=workspace)
        assert error(out, expected(arguments)) < TOLERANCE[BF16]


def _changed(arguments: dict[str, Any], case: Case, contexts: tuple[int, ...]) -> Tensor:
    """Shorter contexts in the same tensors, as a captured step sees them; returns what must come out."""
    arguments["context_lens"].copy_(torch.tensor(contexts, dtype=torch.int32))
    plain = {k: v for k, v in arguments.items() if k not in ("launch", "workspace")}
    return expected(plain)


def test_a_captured_call_follows_its_tensors() -> None:
    case = Case("capture", (2,) * 4, (700, 5, 1000, 64), heads=(8, 2), dims=(64, 64), dtype=BF16)
    arguments = _ready(build(case, device="cuda"), case)
    paged_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(**arguments)
    for contexts in ((700, 5, 1000, 64), (13, 2, 0, 40), (0, 0, 0, 0), (699, 4, 555, 64)):
        reference = _changed(arguments, case, contexts)
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, reference) < TOLERANCE[BF16]


def test_debug_switch_finds_wild_blocks() -> None:
    case = Case("wild", (1, 1), (40, 60), dims=(64, 64), dtype=BF16)
    arguments = build(case, device="cuda")
    arguments["block_tables"][1, 2] = 1 << 20
    with pytest.raises(ValueError, match=r"block_tables\[1, 2\] is 1048576"):
        paged_attention(**arguments, check_block_tables=True)


def test_tuned_launches_compute_the_same(tmp_path: Path) -> None:
    case = Case("tune", **DECODE, heads=(8, 2), dims=(64, 64), dtype=BF16)
    arguments, device = build(case, device="cuda"), torch.device("cuda")
    model = ModelShape(num_heads=8, num_kv_heads=2, key_dim=64, value_dim=64, block_size=16, dtype=BF16)
    shapes = TuneShapes(attention=[model], max_context_len=2048, max_num_seqs=8)
    report = tune_all(shapes, tmp_path, device)
    assert len(report.measured) >= 2
    assert tune_all(shapes, tmp_path, device).measured == []
    table = LaunchTable(tmp_path, device)
    assert any(ShapeClass("split", 2, 2, 64, 64, 16, 16, crowded) in table for crowded in (True, False))
    assert error(paged_attention(**arguments, launches=table), expected(arguments)) < TOLERANCE[BF16]
