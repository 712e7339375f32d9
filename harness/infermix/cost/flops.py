"""FLOPs and experts of one forward pass over a model."""

from __future__ import annotations

from infermix.roles.facts import LayerFacts, MatrixFacts, ModelFacts


def attended_pairs(new_tokens: int, context: int, window: int | None = None) -> int:
    """(query, key) pairs of causal attention: `new_tokens` queries at the end of `context` tokens."""
    first = context - new_tokens + 1
    if window is None or context <= window:
        return new_tokens * (first + context) // 2
    if first >= window:
        return new_tokens * window
    growing = window - first
    return growing * (first + window - 1) // 2 + (new_tokens - growing) * window


def attention_flops(layer: LayerFacts, new_tokens: int, context: int) -> int:
    """Scores and weighted sum of one sequence in one layer; the softmax is not counted."""
    if layer.kind != "attention":
        return 0
    width = layer.num_heads * (layer.key_dim + layer.value_dim)
    return 2 * width * attended_pairs(new_tokens, context, layer.window)


def matrix_flops(matrix: MatrixFacts, num_tokens: float, logits_rows: float) -> float:
    """Two per weight and row; experts see the share of rows routed to them, an embedding is a look-up."""
    if matrix.kind == "embedding":
        return 0.0
    rows = logits_rows if matrix.kind == "lm_head" else num_tokens
    return 2.0 * matrix.parameters * rows * routed_share(matrix)


def routed_share(matrix: MatrixFacts) -> float:
    """Share of the experts that one token uses; 1 for everything that is no expert."""
    return matrix.experts_per_token / matrix.experts if matrix.experts else 1.0


def distinct_experts(num_experts: int, experts_per_token: int, num_tokens: float) -> float:
    """Experts of one layer that at least one of `num_tokens` tokens hits, expected under even routing."""
    if not num_experts:
        return 0.0
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** num_tokens)


def output_matrix(facts: ModelFacts) -> MatrixFacts | None:
    """What makes logits: the output layer, or the embedding that stands in for it when they are tied."""
    heads = [matrix for matrix in facts.matrices if matrix.kind == "lm_head"]
    if heads:
        return heads[0]
    tables = [matrix for matrix in facts.matrices if matrix.kind == "embedding"]
    return max(tables, key=lambda matrix: matrix.parameters, default=None)
