"""Transform `skinny_linear`: linears of few rows read their weights once, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from infermix.errors import Unsupported, WrongResult
from infermix.roles.transform import Stage, TransformContext, TransformReport
from infermix.toolkit.linears import replace_module
from infermix_kernels.gemv import skinny_linear
from infermix_kernels.gemv_gated import gated_row
from infermix_kernels.launch import overlaps_launches
from infermix_kernels.matmul_launch import MatmulWorkspace
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from torch import Tensor, nn

from infermix_triton.fuse_find import random_rows, relative_error
from infermix_triton.fused_layer import FusedLayer, FusedMLP
from infermix_triton.fused_operators import Activation, PlainOperators
from infermix_triton.linear_measure import faster_rows, gating_pays
from infermix_triton.measured import matmul_table, tune_linears

#: Relative errors that one rounding of the result and another order of summation explain.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class SkinnyLinear(nn.Module):
    """`nn.Linear` whose products of some row counts run in a kernel of our own, and all others in torch's.

    `rows[n]` says whether n rows do. The weight is the linear's own parameter, so that tied weights stay tied. With
    `gates`, one row of a gated MLP's first product gets its activation in the same launch.
    """

    gates = False

    def __init__(
        self, linear: nn.Linear, rows: Sequence[bool], workspace: MatmulWorkspace, overlap: bool,
        launches: MatmulTable | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.rows, self._workspace, self._overlap = tuple(rows), workspace, overlap
        self._launches = launches

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.in_features
        if num_rows >= len(self.rows) or not self.rows[num_rows]:
            return F.linear(x, self.weight, self.bias)
        out = self.skinny(x.reshape(num_rows, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)

    def gated(self, x: Tensor, activation: Activation) -> Tensor | None:
        """`activation` of the first half of the product of `x [T, K]`, times the second; `None`: in two launches."""
        if not self.gates or x.shape[0] != 1:
            return None
        return gated_row(x, self.weight, activation, pdl=self._overlap)

    def skinny(self, x: Tensor) -> Tensor:
        """`[M, K]` -> `[M, N]`, at most 16 rows."""
        return skinny_linear(
            x, self.weight, self.bias, workspace=self._workspace, launches=self._launches, pdl=self._overlap
        )


class SkinnyLinearTransform:
    """Replaces every plain `nn.Linear` that the quantizer left, for up to `max_rows` rows.

    With `measure`, each shape of weight keeps torch's product for the row counts where that is the faster one.
    """

    stage: Stage = "after_quantizer"

    def __init__(self, max_rows: int, *, measure: bool) -> None:
        self._max_rows, self._measure = max_rows, measure

    def apply(self, model: nn.Module, context: TransformContext) -> TransformReport:
        groups = _by_shape(model)
        if not groups:
            raise Unsupported(f"skinny_linear: {type(model).__name__} has no plain linear left")
        device = next(iter(groups.values()))[0][1].weight.device
        workspace, overlap = MatmulWorkspace.allocate(device), overlaps_launches(device)
        replaced, errors, kept, gated = 0, [0.0], {}, list[float]()
        notes = self._tune(groups, device, context)
        launches = matmul_table(device)
        for done, (shape, linears) in enumerate(groups.items()):
            skinny = [SkinnyLinear(linear, self._all_rows(), workspace, overlap, launches) for _, linear in linears]
            errors += [_verified(skinny[0], num_rows) for num_rows in (1, self._max_rows)]
            rows = self._chosen(skinny)
            text = f"{shape[0]} x {shape[1]}"
            if not any(rows):
                kept[text] = "torch's product is the faster one"
                continue
            for (name, _), module in zip(linears, skinny, strict=True):
                module.rows = rows
                replace_module(model, name, module)
            replaced += len(linears)
            gated += self._gate(model, skinny)
            notes.append(f"{text}: {', '.join(str(count) for count, used in enumerate(rows) if used)} rows")
            context.progress("skinny_linear", (done + 1) / len(groups))
        return TransformReport(
            name="skinny_linear",
            replaced={
                **({"linear": replaced} if replaced else {}),
                **({"gated product": len(gated)} if gated else {}),
            },
            kept=kept,
            verified={
                **({"linear": max(errors)} if replaced else {}),
                **({"gated product": max(gated)} if gated else {}),
            },
            notes=tuple(notes),
        )

    def _tune(
        self, shapes: Iterable[tuple[int, int, bool]], device: torch.device, context: TransformContext
    ) -> list[str]:
        """Measure launch parameters that this machine's file lacks, where the engine asks for it."""
        if not context.tune or device.type != "cuda":
            return []
        size = getattr(torch, context.dtype).itemsize
        linears = [LinearShape("skinny", out, width, element_bytes=size) for out, width, _ in shapes]
        return list(tune_linears(linears, device, context.progress, self._max_rows))

    def _gate(self, model: nn.Module, skinny: Sequence[SkinnyLinear]) -> list[float]:
        """Let products of gated MLPs gate one row at once, where that pays; an error for each that does."""
        found = [(each, kind) for each, kind in _gated_products(model, skinny) if each.rows[1]]
        if not found:
            return []
        error = _verified_gate(*found[0])
        modules, kind = [each for each, _ in found], found[0][1]
        if self._measure and modules[0].weight.device.type == "cuda" and not gating_pays(modules, kind):
            return []
        for module in modules:
            module.gates = True
        return [error] * len(modules)

    def _all_rows(self) -> tuple[bool, ...]:
        return (False, *[True] * self._max_rows)

    def _chosen(self, modules: Sequence[SkinnyLinear]) -> tuple[bool, ...]:
        if not self._measure or modules[0].weight.device.type != "cuda":
            return self._all_rows()
        return faster_rows(modules, self._max_rows)


def _gated_products(model: nn.Module, skinny: Sequence[SkinnyLinear]) -> Iterator[tuple[SkinnyLinear, Activation]]:
    """First products of gated MLPs among linears of one shape, with their activations."""
    wanted = set(map(id, skinny))
    for module in model.modules():
        if isinstance(module, FusedLayer | FusedMLP):
            linear = module.gate_up_proj
            if id(linear) in wanted and isinstance(linear, SkinnyLinear) and linear.bias is None:
                yield linear, module.activation


def _verified_gate(module: SkinnyLinear, kind: Activation) -> float:
    """Relative error of one gated row. Raises `WrongResult`."""
    with torch.no_grad():
        x = random_rows(1, module.in_features, module.weight)
        plain = PlainOperators().gate(F.linear(x, module.weight), kind)
        error = relative_error(gated_row(x, module.weight, kind), plain)
    if not error <= 4 * _TOLERANCES[module.weight.dtype]:
        raise WrongResult(f"skinny_linear: a gated product of {module.out_features} differs by {error:.1e}")
    return error


def _by_shape(model: nn.Module) -> dict[tuple[int, int, bool], list[tuple[str, nn.Linear]]]:
    groups: dict[tuple[int, int, bool], list[tuple[str, nn.Linear]]] = {}
    for name, linear in _linears(model):
        key = (linear.out_features, linear.in_features, linear.bias is not None)
        groups.setdefault(key, []).append((name, linear))
    return groups


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.dtype in _TOLERANCES and module.weight.stride(1) == 1:
            yield name, module


def _verified(module: SkinnyLinear, num_rows: int) -> float:
    """Relative error of one product on random rows. Raises `WrongResult`."""
    with torch.no_grad():
        x = random_rows(num_rows, module.in_features, module.weight)
        error = relative_error(module.skinny(x), F.linear(x, module.weight, module.bias))
    allowed = _TOLERANCES[module.weight.dtype]
    if not error <= allowed:
        shape = f"{module.out_features} x {module.in_features}"
        raise WrongResult(f"skinny_linear: {shape} with {num_rows} rows differs by {error:.1e} ({allowed:.0e})")
    return error
