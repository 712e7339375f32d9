"""How much memory a cell will take, and how many sequences fit, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from infermix.cost.kv import kv_bytes_read, kv_groups, state_bytes_per_seq
from infermix.cost.roofline import weight_bytes_stored
from infermix.roles.facts import MachineFacts, ModelFacts
from infermix.roles.kv_space import KVShape

#: What the process takes besides tensors: libraries on the host, CUDA context and kernels on the device.
OVERHEAD_BYTES = {"cpu": 500_000_000, "cuda": 800_000_000}
#: Share of a device's memory that a prediction may reach; the rest is the system's and the allocator's.
USABLE_SHARE = 0.95


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes at the peak of a measured run. Loading and quantizing may need more for a moment."""

    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    overhead_bytes: int = 0
    #: Of a model beside the target: its weights, and its KV where the sizes of sequences are known.
    second_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        own = self.weights_bytes + self.kv_bytes + self.activation_bytes + self.overhead_bytes
        return own + self.second_bytes


def predict_memory(
    facts: ModelFacts,
    kv_shape: KVShape | None,
    *,
    device: str = "cpu",
    weight_bits: float | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 1,
) -> MemoryPrediction:
    """`kv_shape` is the sized layout (`None`: no cache); `weight_bits` the quantizer's effective bits.

    `max_num_batched_tokens` is the largest forward in new tokens; `max_num_seqs` bounds the rows of logits.
    """
    return MemoryPrediction(
        weights_bytes=round(weight_bytes_stored(facts, weight_bits)),
        kv_bytes=kv_shape.bytes if kv_shape else 0,
        activation_bytes=activation_bytes(facts, max_num_batched_tokens, max_num_seqs),
        overhead_bytes=OVERHEAD_BYTES.get(device.partition(":")[0], 0),
    )


def activation_bytes(facts: ModelFacts, num_tokens: int, logits_rows: int) -> int:
    """Largest transient of one forward: the residual stream with a layer's widest tensors, or the logits.

    Logits are counted in the model's dtype and once more in fp32, where sampling works.
    """
    widest = max((_width(facts, kind) for kind in ("attention", "mlp", "expert", "shared_expert")), default=0)
    stream = num_tokens * (4 * facts.hidden_size + widest) * facts.dtype_bytes
    logits = logits_rows * facts.vocab_size * (facts.dtype_bytes + 4)
    return max(stream, logits + num_tokens * facts.hidden_size * facts.dtype_bytes)


def fits(prediction: MemoryPrediction, machine: MachineFacts) -> bool:
    """Whether the prediction stays inside the usable share of the device's memory."""
    return prediction.total_bytes <= machine.memory_bytes * USABLE_SHARE


def sequences_that_fit(
    facts: ModelFacts,
    memory_bytes: int,
    context: int,
    *,
    weight_bits: float | None = None,
    kv_element_bytes: float | None = None,
    other_bytes: int = 0,
) -> int:
    """Sequences of `context` tokens whose KV fits beside the weights; 0 when the weights alone do not fit.

    `other_bytes` are activations and overhead. Memory is taken as given: no share is held back.
    """
    left = memory_bytes - weight_bytes_stored(facts, weight_bits) - other_bytes
    each = kv_bytes_read(kv_groups(facts), context, kv_element_bytes or facts.dtype_bytes) + state_bytes_per_seq(
        facts
    )
    return max(0, int(left // each)) if each else 0


def _width(facts: ModelFacts, kind: str) -> int:
    """Values per token that a layer's projections of one kind put out, each token's own experts counted."""
    layers = max(facts.num_layers, 1)
    total = sum(
        matrix.out_features * matrix.count * (matrix.experts_per_token / matrix.experts if matrix.experts else 1)
        for matrix in facts.matrices
        if matrix.kind == kind
    )
    return round(total / layers)
