"""Fusing modules one by one, for bodies that do not match as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from infermix.errors import Unsupported, WrongResult
from infermix.roles.transform import TransformReport
from infermix.toolkit.linears import replace_module
from torch import nn

from infermix_triton.fuse_find import Mismatch, is_norm, mlp_parts, norm_facts, random_rows, relative_error, tolerance
from infermix_triton.fuse_merge import merge_linears, mergeable
from infermix_triton.fused_layer import FusedMLP, FusedNorm
from infermix_triton.fused_operators import Operators


def replace_singles(model: nn.Module, operators: Operators, reason: str) -> TransformReport:
    """RMSNorms and gated MLPs of `model`; `reason` is why its layers are kept. Raises `Unsupported` without any."""
    replaced: dict[str, int] = {}
    verified: dict[str, float] = {}
    for kind, name, old, new in list(_replacements(model, operators)):
        error = _verified(kind, old, new)
        replace_module(model, name, new)
        replaced[kind] = replaced.get(kind, 0) + 1
        verified[kind] = max(error, verified.get(kind, 0.0))
    if not replaced:
        raise Unsupported(f"fuse finds nothing to fuse in {reason}; no RMSNorm and no gated MLP either")
    return TransformReport(name="fuse", replaced=replaced, kept={"decoder layers": reason}, verified=verified)


def _replacements(model: nn.Module, operators: Operators) -> Iterator[tuple[str, str, nn.Module, nn.Module]]:
    for name, module in model.named_modules():
        try:
            if is_norm(module):
                facts = norm_facts(module)
                yield "RMSNorm", name, module, FusedNorm(facts.weight, facts.eps, facts.offset, operators)
            elif hasattr(module, "down_proj"):
                parts = mlp_parts(module)
                if mergeable(parts.gate_up):
                    gate_up = merge_linears(parts.gate_up)
                    yield "gated MLP", name, module, FusedMLP(gate_up, parts.down, parts.activation, operators)
        except Mismatch:
            continue


def _verified(kind: str, old: nn.Module, new: nn.Module) -> float:
    """Relative error on random rows. Raises `WrongResult`."""
    parameter = next(old.parameters())
    x = random_rows(5, parameter.shape[-1], parameter)
    error = relative_error(new(x), old(x))
    allowed = 4 * tolerance(parameter.dtype) if parameter.dtype != torch.float32 else 1e-4
    if not error <= allowed:
        raise WrongResult(f"fuse: a fused {kind} differs from {type(old).__name__} by {error:.1e} ({allowed:.0e})")
    return error
