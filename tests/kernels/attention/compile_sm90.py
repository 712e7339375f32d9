"""Compiles prepared launches for sm_90 without a GPU; a process of its own, without the interpreter."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from infermix_kernels.attention import Prepared
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
    torch.float8_e4m3fn: "fp8e4nv",
}
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
