"""Runs host wrappers on tensors of any device and compiles for sm_90 what they would launch, without a GPU.

For a process of its own, without the interpreter: kernels are not run, so outputs stay unwritten.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "launch_pdl")
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Compiled:
    """What `ptxas` reports, and the assembly; `shared` in bytes."""

    kernel: str
    registers: int
    spills: int
    shared: int
    ptx: str


@contextmanager
def recorded() -> Iterator[list[tuple[JITFunction[Any], dict[str, Any]]]]:
    """Launches inside the block are listed as (kernel, arguments by name) instead of made."""
    launches: list[tuple[JITFunction[Any], dict[str, Any]]] = []

    def record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | options))

    original = JITFunction.run
    JITFunction.run = record  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        JITFunction.run = original  # type: ignore[method-assign]


def compile_launches(call: Callable[[], object]) -> list[Compiled]:
    """Every kernel that `call` launches, compiled."""
    with recorded() as launches:
        call()
    return [compile_one(kernel, arguments) for kernel, arguments in launches]


def compile_one(kernel: JITFunction[Any], arguments: dict[str, Any]) -> Compiled:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind, aligned = _kind_of(value, parameter)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: arguments[name] for name in _OPTIONS if name in arguments}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    registers, spills = _resources(compiled.asm["ptx"])
    return Compiled(kernel.__name__, registers, spills, compiled.metadata.shared, compiled.asm["ptx"])


def _kind_of(value: Any, parameter: Any) -> tuple[str, bool]:
    """(type in Triton's spelling, whether it is a multiple of 16) as a launch would see it."""
    if parameter.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, TensorDescriptor):
        box = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_NAMES[value.base.dtype]}[{box}]>", False
    if isinstance(value, torch.Tensor):
        return f"*{_NAMES[value.dtype]}", value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr", False
    return ("i32" if -(2**31) <= value < 2**31 else "i64"), not parameter.do_not_specialize and value % 16 == 0


def _resources(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes spilled (stores and loads)."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        suffix = "a" if "sm_90a" in ptx else ""
        command = [_ptxas(), "-v", f"-arch=sm_90{suffix}", str(source), "-o", f"{directory}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill", report)
    return max(map(int, registers)), sum(map(int, spills))


def _ptxas() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")
