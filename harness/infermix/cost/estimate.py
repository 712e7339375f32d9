"""Everything the cost model says about one model with its parts on one machine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from infermix.cost.formulas import ridge, ridge_rows
from infermix.cost.kv import kv_bytes_per_token, kv_bytes_read, kv_groups
from infermix.cost.memory import USABLE_SHARE, MemoryPrediction, predict_memory, sequences_that_fit
from infermix.cost.roofline import (
    QUANTIZED_KINDS,
    IdealStep,
    PhaseCost,
    decode_cost,
    ideal_step,
    prefill_cost,
    weight_bytes_stored,
)
from infermix.roles.facts import ModelFacts


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is asked. `weight_bits` and `kv_element_bytes` are `None` where the parts keep the model's dtype.

    `cached`: false for `kv: none`. `kv_seq_bytes`, `kv_batch_bytes`: what a chosen KV layout allocates for one such
    sequence and for the batch; `None` where no layout is chosen, and only what attention reads is counted. Rates and
    `memory_bytes` are `None` where nobody knows them.
    """

    context: int
    batch: int
    weight_bits: float | None = None
    kv_element_bytes: float | None = None
    cached: bool = True
    kv_seq_bytes: float | None = None
    kv_batch_bytes: int | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    memory_bytes: int | None = None
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The answer. `parameters` maps kind -> count; `ideal` maps phase -> least time; ridge in FLOP per byte."""

    facts: ModelFacts
    setting: Setting
    parameters: dict[str, int]
    weight_bytes: float
    bits_per_weight: float
    kv_bytes_per_token: float
    kv_bytes_per_seq: float
    phases: tuple[PhaseCost, ...]
    ideal: dict[str, IdealStep]
    ridge: float | None
    ridge_rows: float | None
    memory: MemoryPrediction
    fits: bool | None
    sequences_that_fit: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, times in seconds."""
        return {
            "model": self.facts.source,
            "model_type": self.facts.model_type,
            "dtype": self.facts.dtype,
            "num_layers": self.facts.num_layers,
            "num_parameters": self.facts.num_parameters,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "bits_per_weight": self.bits_per_weight,
            "context": self.setting.context,
            "batch": self.setting.batch,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_seq": self.kv_bytes_per_seq,
            "phases": {phase.name: self._phase(phase) for phase in self.phases},
            "bytes_per_s": self.setting.bytes_per_s,
            "flops_per_s": self.setting.flops_per_s,
            "ridge": self.ridge,
            "ridge_rows": self.ridge_rows,
            "memory": _memory(self.memory),
            "memory_bytes": self.setting.memory_bytes,
            "fits": self.fits,
            "sequences_that_fit": self.sequences_that_fit,
            "refusal": self.facts.refusal,
            "notes": list(self.facts.notes),
        }

    def _phase(self, phase: PhaseCost) -> dict[str, Any]:
        step = self.ideal.get(phase.name)
        kinds = {
            kind.kind: {"flops": kind.flops, "weight_bytes": kind.weight_bytes, "kv_bytes": kind.kv_bytes}
            for kind in phase.kinds
        }
        return {
            "num_tokens": phase.num_tokens,
            "flops": phase.flops,
            "num_bytes": phase.num_bytes,
            "intensity": phase.intensity,
            "kinds": kinds,
            "ideal_s": step.seconds if step else None,
            "binds": step.binds if step else None,
        }


def estimate(facts: ModelFacts, setting: Setting) -> Estimate:
    """One sequence of `context` tokens prefilled, and a decode step of `batch` sequences at that context."""
    options: dict[str, Any] = {
        "weight_bits": setting.weight_bits,
        "kv_element_bytes": setting.kv_element_bytes,
    }
    phases = (
        prefill_cost(facts, setting.context, **options),
        decode_cost(facts, setting.context, setting.batch, cached=setting.cached, **options),
    )
    moved, computed = setting.bytes_per_s, setting.flops_per_s
    bits = setting.weight_bits or facts.dtype_bytes * 8
    memory = _predicted(facts, setting)
    room = setting.memory_bytes * USABLE_SHARE if setting.memory_bytes else None
    return Estimate(
        facts=facts,
        setting=setting,
        parameters=_parameters(facts),
        weight_bytes=weight_bytes_stored(facts, setting.weight_bits),
        bits_per_weight=_mean_bits(facts, setting.weight_bits),
        kv_bytes_per_token=kv_bytes_per_token(facts, setting.kv_element_bytes) if setting.cached else 0.0,
        kv_bytes_per_seq=_kv_bytes_per_seq(facts, setting),
        phases=phases,
        ideal={phase.name: ideal_step(phase, moved, computed) for phase in phases} if moved and computed else {},
        ridge=ridge(computed, moved) if moved and computed else None,
        ridge_rows=ridge_rows(computed, moved, bits) if moved and computed else None,
        memory=memory,
        fits=memory.total_bytes <= room if room else None,
        sequences_that_fit=_that_fit(facts, setting, memory, room) if room and setting.cached else None,
    )


def _parameters(facts: ModelFacts) -> dict[str, int]:
    counts: dict[str, int] = {}
    for matrix in facts.matrices:
        counts[matrix.kind] = counts.get(matrix.kind, 0) + matrix.parameters
    return {**counts, "other": facts.other_parameters}


def _mean_bits(facts: ModelFacts, weight_bits: float | None) -> float:
    """Bits per weight over everything that a quantizer converts."""
    if weight_bits is None or not any(matrix.kind in QUANTIZED_KINDS for matrix in facts.matrices):
        return float(facts.dtype_bytes * 8)
    return weight_bits


def _kv_bytes_per_seq(facts: ModelFacts, setting: Setting) -> float:
    if not setting.cached:
        return 0.0
    if setting.kv_seq_bytes is not None:
        return setting.kv_seq_bytes
    return kv_bytes_read(kv_groups(facts), setting.context, setting.kv_element_bytes or facts.dtype_bytes)


def _predicted(facts: ModelFacts, setting: Setting) -> MemoryPrediction:
    memory = predict_memory(
        facts,
        None,
        device=setting.device,
        weight_bits=setting.weight_bits,
        max_num_batched_tokens=max(setting.context, setting.batch),
        max_num_seqs=setting.batch,
    )
    if setting.kv_batch_bytes is not None:
        return replace(memory, kv_bytes=setting.kv_batch_bytes)
    return replace(memory, kv_bytes=round(setting.batch * _kv_bytes_per_seq(facts, setting)))


def _that_fit(facts: ModelFacts, setting: Setting, memory: MemoryPrediction, room: float) -> int:
    if setting.kv_seq_bytes:
        left = room - memory.weights_bytes - memory.activation_bytes - memory.overhead_bytes
        return max(0, int(left // setting.kv_seq_bytes))
    return sequences_that_fit(
        facts,
        int(room),
        setting.context,
        weight_bits=setting.weight_bits,
        kv_element_bytes=setting.kv_element_bytes,
        other_bytes=memory.activation_bytes + memory.overhead_bytes,
    )


def _memory(memory: MemoryPrediction) -> dict[str, int]:
    return {
        "weights_bytes": memory.weights_bytes,
        "kv_bytes": memory.kv_bytes,
        "activation_bytes": memory.activation_bytes,
        "overhead_bytes": memory.overhead_bytes,
        "total_bytes": memory.total_bytes,
    }
