"""The operators without a GPU: interpreted, compiled for sm_90, packed and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from infermix_kernels import activation, gemv, kv_write, nf4, nf4_pack, norm, pack, quantize, sampling, w4a16, w8a8
from infermix_kernels.matmul_launch import MatmulLaunch, MatmulWorkspace
from infermix_kernels.rotary import HeadNorms, RotaryTable, rotary

FOLDER = Path(__file__).parent


def _run(arguments: list[str], **environment: str) -> str:
    """Output of a Python process that can import this folder's modules."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    path = os.pathsep.join([str(FOLDER), variables.get("PYTHONPATH", "")])
    variables |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("module", ["operators_interpreted", "nf4_interpreted", "sampling_interpreted"])
def test_interpreted_kernels_match_their_meaning(module: str) -> None:
    path = str(FOLDER / f"{module}.py")
    assert " passed" in _run(["-m", "pytest", "-q", "-p", "no:xdist", path], TRITON_INTERPRET="1")


@pytest.mark.parametrize("which", ["fast", pytest.param("full", marks=pytest.mark.full)])
def test_kernels_compile_for_sm_90(which: str) -> None:
    """Registers and spills of every kernel are printed, as `pytest -s` shows."""
    rows = [json.loads(line) for line in _run([str(FOLDER / "compile_operators.py"), which]).splitlines()]
    for row in rows:
        print(row)
        assert row["spills"] == 0, row
        assert row["shared"] <= 227 * 1024, row
        assert (row["waits"] > 0) == ("early start" in row["case"]), row
        assert row["wgmma"] > 0 or row["kernel"] != "descriptor_kernel", row


def _gptq(q: torch.Tensor, zeros: torch.Tensor, minus_one: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`q [N, K]`, `zeros [N, groups]` as GPTQ stores them, one nibble at a time."""
    qweight = torch.zeros(q.shape[1] // 8, q.shape[0], dtype=torch.int64)
    qzeros = torch.zeros(zeros.shape[1], q.shape[0] // 8, dtype=torch.int64)
    for k in range(q.shape[1]):
        qweight[k // 8] |= q[:, k].long() << (4 * (k % 8))
    for n in range(q.shape[0]):
        qzeros[:, n // 8] |= (zeros[n].long() - int(minus_one)) << (4 * (n % 8))
    return _as_int32(qweight), _as_int32(qzeros)


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _weights(n: int, k: int, groups: int, low: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(low, 16, (n, groups), generator=generator, dtype=torch.uint8)
    return q, zeros, torch.rand(n, groups, generator=generator)


@pytest.mark.parametrize("minus_one", [True, False], ids=["v1", "v2"])
def test_gptq_checkpoints(minus_one: bool) -> None:
    q, zeros, scales = _weights(16, 192, 3)
    qweight, qzeros = _gptq(q, zeros, minus_one)
    weight = pack.from_gptq(qweight, qzeros, scales.t().contiguous(), zeros_minus_one=minus_one)
    expected = (q.float() - zeros.repeat_interleave(64, dim=1)) * scales.repeat_interleave(64, dim=1)
    assert torch.equal(weight.dequantize(), expected)


def test_gptq_act_order() -> None:
    q, zeros, scales = _weights(16, 128, 4)
    g_idx = torch.randperm(128, generator=torch.Generator().manual_seed(5)) // 32
    qweight, qzeros = _gptq(q, zeros, True)
    weight = pack.from_gptq(qweight, qzeros, scales.t().contiguous(), g_idx, zeros_minus_one=True)
    assert torch.equal(weight.dequantize(), (q.float() - zeros[:, g_idx]) * scales[:, g_idx])
    plain = pack.from_gptq(qweight, qzeros, scales.t(), torch.arange(128) // 32, zeros_minus_one=True)
    assert plain.order is None


def test_awq_checkpoints() -> None:
    """Columns 0 to 7 of a word lie in its nibbles 0 4 1 5 2 6 3 7."""
    q, zeros, scales = _weights(16, 64, 2, low=0)
    qweight = torch.zeros(64, 2, dtype=torch.int64)
    qzeros = torch.zeros(2, 2, dtype=torch.int64)
    for n in range(16):
        shift = 4 * (0, 4, 1, 5, 2, 6, 3, 7)[n % 8]
        qweight[:, n // 8] |= q[n].long() << shift
        qzeros[:, n // 8] |= zeros[n].long() << shift
    weight = pack.from_awq(_as_int32(qweight), _as_int32(qzeros), scales.t().contiguous())
    expected = (q.float() - zeros.repeat_interleave(32, dim=1)) * scales.repeat_interleave(32, dim=1)
    assert torch.equal(weight.dequantize(), expected)


def test_symmetric_weights_store_no_zero_points() -> None:
    q, _, scales = _weights(16, 64, 2)
    qweight, qzeros = _gptq(q, torch.full((16, 2), 8), True)
    weight = pack.from_gptq(qweight, qzeros, scales.t(), zeros_minus_one=True)
    assert weight.zeros is None
    assert weight.num_bytes == 16 * 256 // 2 + 2 * 16 * 4


X = torch.zeros(3, 64)
W4 = pack.pack_w4(torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2))
CODES, VALUES = torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(16)
NF4 = nf4_pack.pack_nf4(CODES, torch.ones(32), VALUES, block_size=16)
TABLE = RotaryTable(torch.zeros(9, 8), torch.zeros(9, 8))
POOL = torch.zeros(2, 16, 2, 16)
HEADS = torch.zeros(3, 2, 16)
SLOTS = torch.zeros(3, dtype=torch.int64)
NORMS = HeadNorms(torch.ones(16), torch.ones(16), 1e-6)
BYTES = torch.zeros(8, 64, dtype=torch.int8)
REFUSED: list[tuple[str, Any]] = [
    ("x is torch.float64", lambda: norm.rms_norm(X.double(), X[0], 1e-5)),
    ("weight has shape", lambda: norm.rms_norm(X, torch.zeros(63), 1e-5)),
    ("contiguous in its last dimension", lambda: norm.rms_norm(X.t(), torch.zeros(3), 1e-5)),
    ("residual is torch.float16", lambda: norm.add_rms_norm(X, X.half(), X[0], 1e-5)),
    ("out has shape", lambda: norm.rms_norm(X, X[0], 1e-5, out=X[:2])),
    ("even number", lambda: activation.silu_and_mul(X[:, :63])),
    ("approximate is 'fast'", lambda: activation.gelu_and_mul(X, approximate="fast")),
    ("16 rotated dimensions in heads of 8", lambda: rotary(HEADS[..., :8], HEADS[..., :8], TABLE, SLOTS)),
    ("positions are torch.float32", lambda: rotary(HEADS, HEADS, TABLE, SLOTS.float())),
    ("slot_mapping is torch.int32", lambda: kv_write.write_kv(HEADS, HEADS, POOL, POOL, SLOTS.int())),
    ("need key_scales", lambda: kv_write.write_kv(HEADS, HEADS, POOL.char(), POOL.char(), SLOTS)),
    ("no table", lambda: kv_write.write_kv(HEADS, HEADS, POOL, POOL, SLOTS, q=HEADS)),
    ("no table to rotate what they normed", lambda: kv_write.write_kv(HEADS, HEADS, POOL, POOL, SLOTS, norms=NORMS)),
    ("keys has shape", lambda: kv_write.write_kv(HEADS, HEADS, POOL[..., :1, :], POOL, SLOTS)),
    ("dtype is torch.int16", lambda: quantize.quantize_rows(X, torch.int16)),
    ("1 to 16 rows fit", lambda: gemv.skinny_linear(torch.zeros(17, 64), torch.zeros(8, 64))),
    ("x has 64 columns, the weight 32", lambda: gemv.skinny_linear(X, torch.zeros(8, 32))),
    ("weight is torch.float16", lambda: gemv.skinny_linear(X, torch.zeros(8, 64).half())),
    ("x has 64 columns, the weight 32", lambda: w4a16.w4a16_linear(X, _narrow())),
    ("swapped launches", lambda: w4a16.w4a16_linear(X, W4, launch=MatmulLaunch(16, 64, 128))),
    ("out is torch.float16", lambda: w4a16.w4a16_linear(X, W4, out=torch.zeros(3, 8).half())),
    ("weight is torch.float32", lambda: w8a8.w8a8_linear(X, torch.zeros(8, 64), torch.ones(8))),
    ("weight_scale has shape", lambda: w8a8.w8a8_linear(X, BYTES, torch.ones(7))),
    ("top_k is torch.float32", lambda: sampling.sample(X, *(torch.ones(3) for _ in range(5)))),
    ("groups of 96 columns", lambda: pack.pack_w4(torch.zeros(8, 192, dtype=torch.uint8), torch.ones(8, 2))),
    ("multiple of 32", lambda: pack.pack_w4(torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 4))),
    ("blocks of 24 in rows of 64", lambda: nf4_pack.pack_nf4(CODES, torch.ones(8), VALUES, block_size=24)),
    ("blocks of 128 in rows of 64", lambda: nf4_pack.pack_nf4(CODES, torch.ones(4), VALUES, block_size=128)),
    ("absmax has shape", lambda: nf4_pack.pack_nf4(CODES, torch.ones(7), VALUES, block_size=64)),
    ("absmax is torch.int8", lambda: nf4_pack.pack_nf4(CODES, torch.ones(8).char(), VALUES, block_size=64)),
    ("needs absmax_scale", lambda: _double(None)),
    ("absmax_scale has shape", lambda: _double(torch.ones(2))),
    ("x has 32 columns, the weight 64", lambda: nf4.nf4_linear(X[:, :32], NF4)),
    ("out has shape", lambda: nf4.nf4_linear(X, NF4, out=torch.zeros(3, 7))),
    ("tiles need blocks of 32", lambda: nf4.nf4_linear(X, NF4, launch=MatmulLaunch(16, 64, 256))),
    ("block_k is 64", lambda: nf4.nf4_linear(X, NF4, launch=nf4.GemvLaunch(1, 64))),
    ("must have 32 each", lambda: pack.pack_w4(BYTES.byte(), torch.ones(8, 2), group_index=torch.zeros(64))),
]


def _double(scale: torch.Tensor | None) -> nf4_pack.PackedNf4:
    scales = {"absmax_scale": scale, "absmax_mean": torch.tensor(0.0)}
    return nf4_pack.pack_nf4(CODES, torch.ones(8).char(), VALUES, block_size=64, scale_block=8, **scales)


def _narrow() -> pack.PackedW4:
    return pack.pack_w4(torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 1))


@pytest.mark.parametrize(("reason", "call"), REFUSED, ids=[f"{i} {reason}" for i, (reason, _) in enumerate(REFUSED)])
def test_bad_arguments_are_refused_before_the_launch(reason: str, call: Any) -> None:
    with pytest.raises(ValueError, match=reason):
        call()


def test_a_workspace_that_is_too_small_means_no_split() -> None:
    launch = MatmulLaunch(16, 64, 128, split_k=4)
    assert MatmulWorkspace.allocate("cpu", 4 * 16 * 64).fits(launch, 8, 64)
    assert not MatmulWorkspace.allocate("cpu", 4 * 16 * 64 - 1).fits(launch, 8, 64)
