"""What every host wrapper checks before a launch, and what it has to know about the compiler."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless `condition`."""
    if not condition:
        raise ValueError(message)


def require_floats(**tensors: Tensor) -> None:
    """All given tensors share one floating dtype that the kernels know."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        require(tensor.dtype in FLOATS, f"{name} is {tensor.dtype}; supported: bfloat16, float16, float32")
        require(tensor.dtype == first.dtype, f"{name} is {tensor.dtype}, but {next(iter(tensors))} is {first.dtype}")


def require_device(first: Tensor, *others: Tensor | None) -> None:
    for other in others:
        if other is not None and other.device != first.device:
            raise ValueError(f"tensors on {first.device} and on {other.device}")


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    require(tuple(tensor.shape) == shape, f"{name} has shape {list(tensor.shape)}, must be {list(shape)}")


def require_vector(name: str, tensor: Tensor | None, length: int) -> None:
    """A contiguous vector of `length` elements, or none."""
    if tensor is not None:
        require_shape(name, tensor, (length,))
        require(length <= 1 or tensor.stride(0) == 1, f"{name} must be contiguous")


def require_rows(name: str, tensor: Tensor, dims: tuple[int, ...] = (2,)) -> None:
    """A tensor whose last dimension is contiguous."""
    wanted = " or ".join(str(dim) for dim in dims)
    require(tensor.dim() in dims, f"{name} has {tensor.dim()} dimensions, must have {wanted}")
    last = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    require(last, f"{name} must be contiguous in its last dimension, its strides are {tensor.stride()}")


def output_like(name: str, given: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The preallocated output, checked, or a new one of `like`'s dtype and device."""
    if given is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    require_shape(name, given, shape)
    require(given.dtype == like.dtype, f"{name} is {given.dtype}, must be {like.dtype}")
    require_device(like, given)
    require_rows(name, given, (len(shape),))
    return given


def outer_inner(tensor: Tensor) -> tuple[int, int]:
    """Strides of rows `[T, N]` or `[T, H, N]`, as (outer, inner)."""
    return (tensor.stride(0), 0) if tensor.dim() == 2 else (tensor.stride(0), tensor.stride(1))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which knows no inline assembly."""
    return bool(triton.knobs.runtime.interpret)


def warps_for(elements: int, per_thread: int, most: int = 16) -> int:
    """Warps (a power of two) so that a thread handles about `per_thread` of `elements`."""
    return max(1, min(most, triton.next_power_of_2(triton.cdiv(elements, 32 * per_thread))))
