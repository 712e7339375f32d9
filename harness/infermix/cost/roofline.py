"""What a step moves and computes, and how fast this machine could do it at best.

Counted are weights (once a step, of experts only those hit, of the embedding only the rows looked up), keys and
values (read over the context, written for new tokens). Activations stay on chip in the ideal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from infermix.cost.flops import (
    attention_flops,
    distinct_experts,
    matrix_flops,
    output_matrix,
)
from infermix.cost.formulas import ridge
from infermix.cost.kv import kv_bytes_read, kv_bytes_read_again, kv_groups
from infermix.roles.facts import Ceilings, MatrixFacts, ModelFacts

#: Matrices that quantizers convert; embedding, output layer and routers keep the model's dtype.
QUANTIZED_KINDS = frozenset({"attention", "mlp", "expert", "shared_expert"})
#: The layer kind under which scores and KV traffic are listed, beside the kinds of `MatrixFacts`.
SCORES = "scores"

Binds = Literal["bandwidth", "compute"]


@dataclass(frozen=True)
class KindCost:
    """One layer kind's part of a step."""

    kind: str
    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class PhaseCost:
    """One forward pass. `num_tokens` are the new tokens of all sequences."""

    name: str
    num_tokens: int
    kinds: tuple[KindCost, ...]

    @property
    def flops(self) -> float:
        return sum(kind.flops for kind in self.kinds)

    @property
    def weight_bytes(self) -> float:
        return sum(kind.weight_bytes for kind in self.kinds)

    @property
    def kv_bytes(self) -> float:
        return sum(kind.kv_bytes for kind in self.kinds)

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True)
class IdealStep:
    """The least time of a step: the longer of moving its bytes and computing its FLOPs."""

    seconds: float
    bytes_s: float
    flops_s: float
    binds: Binds


def phase_cost(
    facts: ModelFacts,
    name: str,
    *,
    batch: int,
    new_tokens: int,
    context: int,
    weight_bits: float | None = None,
    kv_element_bytes: float | None = None,
    logits_rows: int | None = None,
) -> PhaseCost:
    """Cost of one forward over `batch` sequences that each have `new_tokens` new of `context` tokens.

    `weight_bits` are the effective bits of quantized weights (`None`: the model's dtype); `logits_rows` defaults to
    one per sequence.
    """
    tokens = batch * new_tokens
    rows = batch if logits_rows is None else logits_rows
    kinds = [*_matrix_costs(facts, tokens, rows, weight_bits)]
    kinds.append(_attention_cost(facts, batch, new_tokens, context, kv_element_bytes or facts.dtype_bytes))
    return PhaseCost(name, tokens, tuple(kinds))


def prefill_cost(facts: ModelFacts, num_tokens: int, batch: int = 1, **options: Any) -> PhaseCost:
    """Whole prompts of `num_tokens` at once; options as in `phase_cost`."""
    return phase_cost(facts, "prefill", batch=batch, new_tokens=num_tokens, context=num_tokens, **options)


def decode_cost(facts: ModelFacts, context: int, batch: int = 1, *, cached: bool = True, **options: Any) -> PhaseCost:
    """One token per sequence; without a cache (`kv: none`) the whole context is forwarded again."""
    new_tokens = 1 if cached else context
    return phase_cost(facts, "decode", batch=batch, new_tokens=new_tokens, context=context, **options)


def weight_bytes_stored(facts: ModelFacts, weight_bits: float | None = None) -> float:
    """Bytes of all weights in memory, quantized ones at `weight_bits`."""
    matrices = sum(matrix.parameters * _bytes_per_weight(facts, matrix, weight_bits) for matrix in facts.matrices)
    return matrices + facts.other_parameters * facts.dtype_bytes


def ideal_step(cost: PhaseCost, bytes_per_s: float, flops_per_s: float) -> IdealStep:
    bytes_s, flops_s = cost.num_bytes / bytes_per_s, cost.flops / flops_per_s
    return IdealStep(max(bytes_s, flops_s), bytes_s, flops_s, "bandwidth" if bytes_s >= flops_s else "compute")


def limit_fractions(num_bytes: float, flops: float, seconds: float, ceilings: Ceilings, dtype: str) -> dict[str, Any]:
    """How near a measured run came to this machine's limit.

    `num_bytes` and `flops` are what the work needs (sums of `PhaseCost`), `seconds` what it took. Keys: achieved
    `bytes_per_s` and `flops_per_s`; `mbu`, `mfu` over the measured ceilings; `binds`, the limit that is nearer;
    `ideal_s` and `fraction` = ideal_s / seconds. Keys that need a ceiling which was not measured are left out.
    """
    peak_bytes, peak_flops = ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s.get(dtype)
    result: dict[str, Any] = {"bytes_per_s": num_bytes / seconds, "flops_per_s": flops / seconds}
    if peak_bytes:
        result["mbu"] = num_bytes / seconds / peak_bytes
    if peak_flops:
        result["mfu"] = flops / seconds / peak_flops
    if peak_bytes and peak_flops:
        bytes_s, flops_s = num_bytes / peak_bytes, flops / peak_flops
        result["binds"] = "bandwidth" if bytes_s >= flops_s else "compute"
        result["ideal_s"] = max(bytes_s, flops_s)
        result["fraction"] = result["ideal_s"] / seconds
        result["ridge"] = ridge(peak_flops, peak_bytes)
        result["intensity"] = flops / num_bytes if num_bytes else 0.0
    return result


def _bytes_per_weight(facts: ModelFacts, matrix: MatrixFacts, weight_bits: float | None) -> float:
    quantized = weight_bits is not None and matrix.kind in QUANTIZED_KINDS
    return weight_bits / 8 if quantized and weight_bits is not None else facts.dtype_bytes


def _matrix_costs(facts: ModelFacts, tokens: int, rows: int, weight_bits: float | None) -> list[KindCost]:
    flops: dict[str, float] = {}
    read: dict[str, float] = {}
    for matrix in facts.matrices:
        flops[matrix.kind] = flops.get(matrix.kind, 0.0) + matrix_flops(matrix, tokens, rows)
        weights = _weights_read(matrix, tokens) * _bytes_per_weight(facts, matrix, weight_bits)
        read[matrix.kind] = read.get(matrix.kind, 0.0) + weights
    head = output_matrix(facts)
    if head is not None and head.kind == "embedding":
        flops["lm_head"] = 2.0 * head.parameters * rows
        read["lm_head"] = head.parameters * float(facts.dtype_bytes)
    read["other"] = facts.other_parameters * float(facts.dtype_bytes)
    return [KindCost(kind, flops.get(kind, 0.0), read[kind]) for kind in read]


def _weights_read(matrix: MatrixFacts, tokens: int) -> float:
    if matrix.kind == "embedding":
        return float(min(tokens * matrix.count, matrix.out_features * matrix.count) * matrix.in_features)
    if matrix.experts:
        hit = distinct_experts(matrix.experts, matrix.experts_per_token, tokens)
        return matrix.parameters * hit / matrix.experts
    return float(matrix.parameters)


def _attention_cost(facts: ModelFacts, batch: int, new_tokens: int, context: int, element_bytes: float) -> KindCost:
    groups = kv_groups(facts)
    written = sum(group.bytes_per_token(element_bytes) for group in groups) * new_tokens
    read = kv_bytes_read(groups, context, element_bytes) + kv_bytes_read_again(facts, context, element_bytes)
    flops = sum(attention_flops(layer, new_tokens, context) for layer in facts.layers)
    return KindCost(SCORES, float(batch * flops), 0.0, batch * (read + written))
