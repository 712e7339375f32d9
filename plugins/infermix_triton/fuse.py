"""Transform `fuse`: decoder layers of merged linears and fused kernels, in place of transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from infermix.errors import WrongResult
from infermix.roles.transform import Stage, TransformContext, TransformReport
from infermix_kernels.launch import overlaps_launches
from infermix_kernels.rotary import RotaryTable
from torch import Tensor, nn

from infermix_triton.fuse_find import (
    Body,
    LayerParts,
    Mismatch,
    find_body,
    layer_parts,
    norm_facts,
    random_rows,
    relative_error,
)
from infermix_triton.fuse_merge import merge_linears, mergeable
from infermix_triton.fuse_single import replace_singles
from infermix_triton.fuse_verify import Recorder, Trace, recording, trace, worst
from infermix_triton.fused_layer import FusedAngles, FusedLayer, FusedNorm, Heads, Stream
from infermix_triton.fused_operators import Operators, PlainOperators, TritonOperators

#: Relative errors that rounding explains within a layer, and through a whole body, where layers amplify it.
_LAYER_TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
_BODY_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
#: A GPU computes few and many rows with different launches: both are checked, the many in the first layer only.
_FEW, _MANY = 5, 600
#: Positions of the table besides those that the engine says it needs.
_MIN_POSITIONS, _MAX_POSITIONS = 2048, 1 << 17


class FuseTransform:
    """Merged q/k/v and gate/up products; norm with addition and rotary with the KV write in one launch each.

    A body is replaced as a whole or not at all; where it does not match, RMSNorms and gated MLPs are replaced singly.
    """

    stage: Stage = "before_quantizer"

    def apply(self, model: nn.Module, context: TransformContext) -> TransformReport:
        operators = TritonOperators(overlaps_launches(torch.device(context.device)))
        with torch.no_grad():
            try:
                return _Fusion(model, find_body(model), context, operators).apply()
            except Mismatch as mismatch:
                return replace_singles(model, operators, f"{type(model).__name__}: {mismatch}")


class _Fusion:
    """One body being fused. The model is changed by `apply` alone, when everything matched."""

    def __init__(self, model: Any, body: Body, context: TransformContext, operators: Operators) -> None:
        self.model, self.body, self.context, self.operators = model, body, context, operators
        self.layers: Sequence[nn.Module] = list(body.module.get_submodule(body.layers).children())
        self.norm, self.rotary = (body.module.get_submodule(name) for name in (body.norm, body.rotary))
        self.dtype = next(self.layers[0].parameters()).dtype
        if self.dtype not in _LAYER_TOLERANCES:
            raise Mismatch(f"its layers are in {self.dtype}")

    def apply(self) -> TransformReport:
        parts = [_named(index, layer_parts, layer) for index, layer in enumerate(self.layers)]
        final = norm_facts(self.norm)
        table, table_error = self._table(parts[0].norms["attention"].weight)
        angles = FusedAngles(table, self.operators)
        with recording(self.model):
            before = self._run_body()
            fused, errors = self._fuse_layers(parts, angles)
            norm = FusedNorm(final.weight, final.eps, final.offset, self.operators)
            norm_error = self._verify_norm(norm)
            body_error = self._replace((nn.ModuleList(fused), norm, angles), before)
        for part in parts:
            _strip(part.attention)
        verified = {"decoder layer": max(errors), "final norm": norm_error, "rotary angles": table_error}
        return TransformReport(
            name="fuse",
            replaced={"decoder layer": len(fused), "final norm": 1, "rotary angles": 1},
            kept={"embedding, head": "one launch each already"},
            verified=verified,
            notes=(f"the whole body on random input differs by {body_error:.1e}",),
        )

    def _table(self, like: Tensor) -> tuple[RotaryTable, float]:
        """Angles of every position, and how far they are from those of a few positions asked singly."""
        wanted = max(self.context.max_model_len, min(self.context.facts.max_position_embeddings, _MAX_POSITIONS))
        length = max(wanted, _MIN_POSITIONS)
        dummy = like.new_zeros(1, 1, like.shape[0])
        cos, sin = self.rotary(dummy, torch.arange(length, device=like.device)[None])
        table = _halved(cos[0], sin[0])
        some = torch.tensor([length - 1, 3, 0, length // 2], device=like.device)
        again = _halved(*(angles[0] for angles in self.rotary(dummy, some[None])))
        error = max(relative_error(table.cos[some], again.cos), relative_error(table.sin[some], again.sin))
        if error > _LAYER_TOLERANCES[self.dtype]:
            raise Mismatch("its rotary angles of a position depend on the other positions")
        return table, error

    def _fuse_layers(self, parts: Sequence[LayerParts], angles: FusedAngles) -> tuple[list[FusedLayer], list[float]]:
        fused, errors = [], []
        for index, (layer, part) in enumerate(zip(self.layers, parts, strict=True)):
            made, error = _named(index, self._fuse_layer, layer, part, angles, index == 0)
            fused.append(made)
            errors.append(error)
            self.context.progress("fuse", (index + 1) / len(parts))
        return fused, errors

    def _fuse_layer(
        self, layer: nn.Module, parts: LayerParts, angles: FusedAngles, first: bool
    ) -> tuple[FusedLayer, float]:
        hidden = self._hidden(_FEW, 1.0)
        expected = self._original(layer, parts, hidden)
        size = float((expected.steps["attention output"] + expected.steps["MLP output"]).float().std())
        hidden = hidden * size
        expected = self._original(layer, parts, hidden)
        fused = _build(layer, parts, expected, self.operators)
        self._match(fused, hidden, expected, angles)
        errors = [self._verify(fused, hidden, expected, angles)]
        if first and hidden.device.type == "cuda":
            hidden = self._hidden(_MANY, size)
            errors.append(self._verify(fused, hidden, self._original(layer, parts, hidden), angles))
        return fused, max(errors)

    def _hidden(self, num_tokens: int, size: float) -> Tensor:
        like = next(self.layers[0].parameters())
        width = next(self.norm.parameters()).shape[0]
        return random_rows(num_tokens, width, like, self.context.seed)[None] * size

    def _positions(self, hidden: Tensor) -> Tensor:
        return torch.arange(hidden.shape[1], device=hidden.device)[None] * 3 + 1

    def _original(self, layer: nn.Module, parts: LayerParts, hidden: Tensor) -> Trace:
        angles = self.rotary(hidden, self._positions(hidden))
        return trace(layer, parts.o, parts.mlp.down, hidden, angles)

    def _match(self, fused: FusedLayer, hidden: Tensor, expected: Trace, angles: FusedAngles) -> None:
        """Is the layer what we take it for? Decided with plain operators. Raises `Mismatch`."""
        seen = {}
        for fused.rotary in (True, False):
            name, error = worst(self._errors(fused, hidden, expected, angles, PlainOperators()))
            if error <= _LAYER_TOLERANCES[self.dtype]:
                return
            seen[fused.rotary] = f"its {name} differs by {error:.1e}"
        raise Mismatch(f"it computes something else than norm, attention, norm and gated MLP: {seen[True]}")

    def _verify(self, fused: FusedLayer, hidden: Tensor, expected: Trace, angles: FusedAngles) -> float:
        name, error = worst(self._errors(fused, hidden, expected, angles, self.operators))
        if not error <= _LAYER_TOLERANCES[self.dtype]:
            raise WrongResult(
                f"fuse: the {name} of a fused layer differs from that of {type(self.model).__name__} by {error:.1e} "
                f"({hidden.shape[1]} random rows, {self.dtype}; {_LAYER_TOLERANCES[self.dtype]:.0e} is allowed)"
            )
        return error

    def _errors(
        self, fused: FusedLayer, hidden: Tensor, expected: Trace, angles: FusedAngles, operators: Operators
    ) -> dict[str, float]:
        rotation = FusedAngles(RotaryTable(angles.cos, angles.sin, angles.interleaved), operators)
        fused.operators = operators
        try:
            seen = trace(fused, fused.o_proj, fused.down_proj, hidden, rotation(hidden, self._positions(hidden)))
        finally:
            fused.operators = self.operators
        return seen.errors(expected)

    def _verify_norm(self, norm: FusedNorm) -> float:
        hidden = self._hidden(_FEW, 1.0)
        error = relative_error(norm(hidden), self.norm(hidden))
        if not error <= _LAYER_TOLERANCES[self.dtype]:
            raise WrongResult(f"fuse: the fused final norm differs by {error:.1e}")
        return error

    def _run_body(self) -> Tensor:
        hidden = self._hidden(_FEW, 1.0)
        positions = torch.arange(_FEW, device=hidden.device)[None]
        body: Any = self.body.module
        out = body(inputs_embeds=hidden, position_ids=positions, use_cache=False, recorder=Recorder())
        return out.last_hidden_state

    def _replace(self, modules: tuple[nn.Module, nn.Module, nn.Module], expected: Tensor) -> float:
        """Put fused modules into the body and run it; put the old ones back if it cannot. Raises `Mismatch`."""
        names = (self.body.layers, self.body.norm, self.body.rotary)
        old = [self.body.module.get_submodule(name) for name in names]
        _assign(self.body.module, names, modules)
        try:
            error = relative_error(self._run_body(), expected)
        except (AttributeError, TypeError) as failure:
            _assign(self.body.module, names, old)
            if Stream.__name__ not in str(failure):
                raise
            raise Mismatch(f"it does more with the output of its layers than to norm it ({failure})") from failure
        if not error <= _BODY_TOLERANCES[self.dtype]:
            raise WrongResult(f"fuse: the fused body of {type(self.model).__name__} differs by {error:.1e}")
        return error


def _named(index: int, function: Any, *arguments: Any) -> Any:
    """`function(*arguments)`; a `Mismatch` says which layer it is about."""
    try:
        return function(*arguments)
    except Mismatch as mismatch:
        raise Mismatch(f"layer {index}: {mismatch}") from mismatch


def _build(layer: nn.Module, parts: LayerParts, seen: Trace, operators: Operators) -> FusedLayer:
    groups = {"qkv": parts.qkv, "o": (parts.o,), "gate_up": parts.mlp.gate_up, "down": (parts.mlp.down,)}
    if not all(mergeable(group) for group in groups.values()):
        raise Mismatch("linears of one input differ in width, dtype or device")
    heads = _heads(seen)
    if any(parts.norms[name].weight.shape[0] != heads.key_dim for name in ("q", "k") if name in parts.norms):
        raise Mismatch("its norms of queries and keys span several heads")
    fused = FusedLayer(
        attention=parts.attention,
        heads=heads,
        linears={name: merge_linears(group) for name, group in groups.items()},
        norms={
            name: FusedNorm(facts.weight, facts.eps, facts.offset, operators) for name, facts in parts.norms.items()
        },
        activation=parts.mlp.activation,
        operators=operators,
    )
    for name, value in vars(layer).items():
        if not name.startswith("_") and isinstance(value, str):  # what a body reads from its layers (attention type)
            setattr(fused, name, value)
    return fused.eval()


def _heads(seen: Trace) -> Heads:
    query, key, value = (seen.steps[name] for name in ("query", "key", "value"))
    given = {name: value for name, value in seen.given.items() if value is not None and value is not False}
    return Heads(query.shape[1], key.shape[1], query.shape[3], value.shape[3], given)


def _halved(cos: Tensor, sin: Tensor) -> RotaryTable:
    """`[T, R]` of transformers, where every angle stands twice, as a table. Raises `Mismatch`."""
    half = cos.shape[1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        return RotaryTable(cos[:, :half].contiguous(), sin[:, :half].contiguous())
    if torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
        return RotaryTable(cos[:, ::2].contiguous(), sin[:, ::2].contiguous(), interleaved=True)
    raise Mismatch("its rotary angles are not doubled in a known order")


def _assign(module: nn.Module, names: Sequence[str], children: Sequence[nn.Module]) -> None:
    for name, child in zip(names, children, strict=True):
        setattr(module, name, child)


def _strip(attention: nn.Module) -> None:
    """Let the merged children go; what attention functions read stays."""
    for name, _ in list(attention.named_children()):
        delattr(attention, name)
