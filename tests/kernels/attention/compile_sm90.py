"""Compiles prepared launches for sm_90 without a GPU; a process of its own, without the interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from infermix_kernels.attention_call import Call, Prepared, Rules, Workspace
from infermix_kernels.attention_prepare import prepare
from infermix_kernels.launch import Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
RULES: dict[str, Any] = {"window": 1024, "softcap": 30.0, "sinks": True}
#: DeepSeek-V3's layers over compressed rows.
LATENT: dict[str, Any] = {"heads": (128, 1), "dims": (576, 512), "block_size": 64, "shared": True}
_LAUNCH_KEYS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Compiled:
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str
    ttgir: str
    cubin: bytes


def compile_prepared(prepared: Prepared) -> Compiled:
    """Raises what the compiler raises."""
    kernel = prepared.kernel
    unknown = set(prepared.constants) - {*kernel.arg_names, *_LAUNCH_KEYS}
    assert not unknown, f"{kernel.__name__} does not take {sorted(unknown)}"
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    plain = {param.name for param in kernel.params if param.do_not_specialize}
    for index, (name, value) in enumerate(zip(kernel.arg_names, prepared.arguments, strict=False)):
        signature[name] = _type(value)
        if value is None:
            constants[(index,)] = None
        elif name not in plain and _divisible(value):
            attributes[(index,)] = [["tt.divisibility", 16]]
    for index, name in enumerate(kernel.arg_names):
        if name in prepared.constants:
            signature[name] = "constexpr"
            constants[(index,)] = prepared.constants[name]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: prepared.constants[name] for name in _LAUNCH_KEYS if name in prepared.constants}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spills = _resources(built.asm["ptx"])
    return Compiled(
        registers, spills, built.metadata.shared, built.asm["ptx"], built.asm["ttgir"], built.asm["cubin"]
    )


def _type(value: Any) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, TensorDescriptor):
        box = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_NAMES[value.base.dtype]}[{box}]>"
    if isinstance(value, torch.Tensor):
        return "*" + _NAMES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _divisible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resources(ptx: str) -> tuple[int, int]:
    """Registers a thread and spilled bytes, from the assembler that triton brings along."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(assembler), "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores", report)
    assert registers, report
    return int(registers[1]), int(spills[1]) if spills else 0


def _prepared(
    lens: tuple[int, int, int],
    dims: tuple[int, int] = (128, 128),
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None,
    launch: Launch | None = None,
    **rules: Any,
) -> Prepared:
    """The launch of `lens` = (sequences, query length, context), by default for 32 heads over 8 KV heads."""
    batch, query, context = lens

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    width = -(-context // block_size) if block_size else 0
    shape = (batch * width + 1, block_size) if block_size else (batch, context)
    heads, kv_heads = rules.pop("heads", (32, 8))
    keys = tensor(*shape, kv_heads, dims[0], of=kv or dtype)
    shared = rules.pop("shared", False)
    values = keys[..., : dims[1]] if shared else tensor(*shape, kv_heads, dims[1], of=kv or dtype)
    scales = tensor(shape[0], 8, shape[1], of=torch.float32) if kv else None
    tree, sinks = rules.pop("tree", False), rules.pop("sinks", False)
    call = Call(
        tensor(batch * query, heads, dims[0]),
        keys,
        values,
        tensor(batch * query, heads, dims[1]),
        tensor(batch + 1, of=torch.int32),
        tensor(batch, of=torch.int32),
        tensor(batch, width, of=torch.int32) if block_size else None,
        tensor(heads) if sinks else None,
        (scales, scales),
        shared,
    )
    mask = tensor(batch * query, of=torch.int64) if tree else None
    wanted = Rules(dims[0] ** -0.5, rules.get("window"), rules.get("softcap"), mask)
    return prepare(call, wanted, (query, context), Workspace.allocate("meta"), None, launch)


#: Name, bytes that may spill, launch. Prefill is held to 128 registers so that two programs share a multiprocessor:
#: what spills is used outside of the loop over full tiles, or a few times in it.
CONFIGURATIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("decode", 0, {"lens": (64, 1, 4096)}),
    ("decode, one sequence", 0, {"lens": (1, 1, 32768)}),
    ("decode dense, window, sinks, softcap", 0, {"lens": (8, 1, 4096), "block_size": 0, **RULES}),
    ("decode int8", 0, {"lens": (64, 1, 4096), "kv": torch.int8}),
    ("decode fp8", 0, {"lens": (64, 1, 4096), "kv": torch.float8_e4m3fn}),
    ("verification with a tree", 0, {"lens": (8, 8, 4096), "tree": True}),
    ("prefill", 256, {"lens": (4, 4096, 4096)}),
    ("prefill, blocks of 64", 256, {"lens": (4, 4096, 4096), "block_size": 64}),
    ("prefill int8", 0, {"lens": (4, 4096, 4096), "kv": torch.int8}),
    ("latent decode, 128 heads", 0, {"lens": (64, 1, 8192), **LATENT}),
    ("latent decode, 16 heads", 0, {"lens": (64, 1, 8192), **LATENT, "heads": (16, 1)}),
    ("decode fp32", 0, {"lens": (4, 1, 4096), "dims": (64, 64), "dtype": torch.float32}),
]


if __name__ == "__main__":
    for name, allowed, wanted in CONFIGURATIONS:
        built = compile_prepared(_prepared(**wanted))
        row = {"name": name, "registers": built.registers, "spill_bytes": built.spill_bytes}
        row |= {"allowed_spill_bytes": allowed, "shared_bytes": built.shared_bytes}
        print(json.dumps({**row, "wgmma": built.ptx.count("wgmma.mma_async")}), flush=True)
