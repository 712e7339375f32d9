"""Tensors as a checkpoint lists them, and how their names tell what they are for."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from infermix.roles.facts import MatrixFacts

_EMBEDDINGS = (
    "embed_tokens.weight",
    "embed_in.weight",
    "wte.weight",
    "wpe.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_positions.weight",
    "token_embd.weight",
    "position_embd.weight",
    "transformer.w.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight")
_ROUTER = re.compile(r"\.(gate|router|ffn_gate_inp|wg)(\.(linear|proj|weight|layer|gate))*$")
_SHARED_EXPERT = re.compile(r"shared_(expert|mlp)|ffn_\w+_shexp")
_EXPERT = re.compile(r"\.experts\.|\.input_linear|\.output_linear|ffn_\w+_exps")
_ATTENTION = re.compile(r"attn_(q|k|v|qkv|output)\b|(^|[._])(attn|attention|self_attn|self_attention|mixer)[._]")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in PyTorch's order (rows first), `type` as the file names it."""

    name: str
    shape: tuple[int, ...]
    type: str = ""
    num_bytes: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Inventory:
    """Every weight of a model: matrices by kind, and how many parameters are in none of them."""

    matrices: tuple[MatrixFacts, ...]
    other_parameters: int
    tied: bool

    @property
    def num_parameters(self) -> int:
        return sum(matrix.parameters for matrix in self.matrices) + self.other_parameters


def matrix_kind(name: str) -> str:
    """The `MatrixFacts.kind` that a tensor name stands for (Hugging Face and GGUF naming)."""
    if name.endswith(_EMBEDDINGS):
        return "embedding"
    if name.endswith(_HEADS) or name == "output.weight":
        return "lm_head"
    if _SHARED_EXPERT.search(name):
        return "router" if name.endswith("expert_gate.weight") else "shared_expert"
    if _EXPERT.search(name):
        return "expert"
    if _ROUTER.search(name.removesuffix(".weight")) or name.endswith("ffn_gate_inp.weight"):
        return "router"
    return "attention" if _ATTENTION.search(name) else "mlp"


def inventory(
    tensors: Iterable[TensorInfo], *, experts_per_token: int = 0, num_experts: int = 0, transposed: bool = False
) -> Inventory:
    """Group tensors into matrices. `transposed`: weights are stored `[in, out]` (GPT-2's Conv1D).

    A tensor of three dimensions is a stack of experts; one of fewer than two dimensions is "other".
    """
    counts: Counter[tuple[str, int, int]] = Counter()
    other = 0
    for tensor in tensors:
        if not _is_matrix(tensor):
            other += tensor.num_elements
            continue
        kind = matrix_kind(tensor.name)
        rows, columns = tensor.shape[-2:]
        if transposed and kind != "embedding" and kind != "lm_head":
            rows, columns = columns, rows
        counts[kind, columns, rows] += tensor.num_elements // (rows * columns)
    matrices = tuple(
        MatrixFacts(kind, inner, outer, count, *_routing(kind, num_experts, experts_per_token))
        for (kind, inner, outer), count in counts.items()
    )
    return Inventory(matrices, other, tied=not any(m.kind == "lm_head" for m in matrices))


def _is_matrix(tensor: TensorInfo) -> bool:
    """Stacked expert biases `[experts, width]` and one-column filters are not read as matrices."""
    return len(tensor.shape) >= 2 and min(tensor.shape[-2:]) > 1 and not tensor.name.endswith("bias")


def _routing(kind: str, num_experts: int, experts_per_token: int) -> tuple[int, int]:
    return (num_experts, experts_per_token) if kind == "expert" else (0, 0)
