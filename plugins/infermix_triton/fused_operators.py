"""What a fused layer computes between its linears: once as Triton kernels, once as their plain PyTorch meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from infermix.roles.kv_store import KVPools
from infermix_kernels import activation, kv_write, norm, rotary
from infermix_kernels.reference import ops as reference
from infermix_kernels.rotary import HeadNorms, RotaryTable
from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "gelu_erf"]


class NormWeights(Protocol):
    """RMSNorm by `weight + offset`."""

    @property
    def weight(self) -> Tensor: ...

    eps: float
    offset: float


class Operators(Protocol):
    """Rows are flat: `x [T, N]`, heads `[T, H, D]`. A head norm and `rotate` may overwrite what they are given."""

    def rms_norm(self, x: Tensor, by: NormWeights) -> Tensor: ...

    def norm_heads(self, x: Tensor, by: NormWeights) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, by: NormWeights) -> tuple[Tensor, Tensor]:
        """(norm of the new residual, the new residual)."""
        ...

    def gate(self, packed: Tensor, kind: Activation) -> Tensor:
        """`kind(packed[:, :F]) * packed[:, F:]`."""
        ...

    def rotate(self, q: Tensor, k: Tensor, table: RotaryTable, positions: Tensor) -> tuple[Tensor, Tensor]: ...

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[RotaryTable, Tensor], norms: HeadNorms | None,
        pools: KVPools, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """Rotated queries; rotated keys and values go to their slots. `rotary` is a table and positions."""
        ...


@dataclass(frozen=True, slots=True)
class TritonOperators:
    """Kernels, one launch each. `overlap`: each may start while the one before it drains."""

    overlap: bool

    def rms_norm(self, x: Tensor, by: NormWeights) -> Tensor:
        return norm.rms_norm(x, by.weight, by.eps, weight_offset=by.offset, pdl=self.overlap)

    def norm_heads(self, x: Tensor, by: NormWeights) -> Tensor:
        return norm.rms_norm(x, by.weight, by.eps, weight_offset=by.offset, out=x, pdl=self.overlap)

    def add_rms_norm(self, x: Tensor, residual: Tensor, by: NormWeights) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, residual, by.weight, by.eps, weight_offset=by.offset, pdl=self.overlap)

    def gate(self, packed: Tensor, kind: Activation) -> Tensor:
        if kind == "silu":
            return activation.silu_and_mul(packed, pdl=self.overlap)
        return activation.gelu_and_mul(packed, approximate=_APPROXIMATE[kind], pdl=self.overlap)

    def rotate(self, q: Tensor, k: Tensor, table: RotaryTable, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary.rotary(q, k, table, positions, q_out=q, k_out=k, pdl=self.overlap)

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[RotaryTable, Tensor], norms: HeadNorms | None,
        pools: KVPools, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        kv_write.write_kv(
            k,
            v,
            pools.keys,
            pools.values,
            slots,
            key_scales=pools.key_scales,
            value_scales=pools.value_scales,
            table=rotary[0],
            positions=rotary[1],
            q=q,
            q_out=q,
            norms=norms,
            pdl=self.overlap,
        )
        return q


@dataclass(frozen=True, slots=True)
class PlainOperators:
    """The same in plain PyTorch, in fp32 inside; decides whether a layer is what a fused layer computes."""

    def rms_norm(self, x: Tensor, by: NormWeights) -> Tensor:
        return reference.rms_norm(x, by.weight, by.eps, weight_offset=by.offset)

    def norm_heads(self, x: Tensor, by: NormWeights) -> Tensor:
        return self.rms_norm(x, by)

    def add_rms_norm(self, x: Tensor, residual: Tensor, by: NormWeights) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, residual, by.weight, by.eps, weight_offset=by.offset)

    def gate(self, packed: Tensor, kind: Activation) -> Tensor:
        if kind == "silu":
            return reference.silu_and_mul(packed)
        return reference.gelu_and_mul(packed, approximate=_APPROXIMATE[kind])

    def rotate(self, q: Tensor, k: Tensor, table: RotaryTable, positions: Tensor) -> tuple[Tensor, Tensor]:
        return _rotated(q, table, positions), _rotated(k, table, positions)

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[RotaryTable, Tensor], norms: HeadNorms | None,
        pools: KVPools, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        if norms is not None:
            q, k = (reference.rms_norm(x, weight, norms.eps, weight_offset=norms.offset)
                    for x, weight in ((q, norms.q), (k, norms.k)))  # fmt: skip
        reference.write_kv(
            _rotated(k, *rotary),
            v,
            pools.keys,
            pools.values,
            slots,
            key_scales=pools.key_scales,
            value_scales=pools.value_scales,
        )
        return _rotated(q, *rotary)


_APPROXIMATE = {"gelu_tanh": "tanh", "gelu_erf": "none"}


def _rotated(x: Tensor, table: RotaryTable, positions: Tensor) -> Tensor:
    return reference.rotate(x, table.cos, table.sin, positions, interleaved=table.interleaved)
