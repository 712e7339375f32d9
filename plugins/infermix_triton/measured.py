"""Launch parameters measured on this machine: the files that hold them, and measuring what they lack in set-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from infermix.paths import cache_dir
from infermix.roles.attention import TuneContext
from infermix_kernels.attention_checks import MAX_HEAD_DIM
from infermix_kernels.attention_tune import ModelShape
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from infermix_kernels.tune import TuneReport, TuneShapes, tune_all

#: Rows of decode steps that linears are measured for; a prefill keeps the defaults.
_ROWS = (1, 2, 4, 8, 16, 32, 64)


def matmul_table(device: torch.device) -> MatmulTable | None:
    """What was measured for products on this machine; `None` where kernels are only interpreted."""
    return MatmulTable(cache_dir("kernels"), device) if device.type == "cuda" else None


def tune_linears(
    shapes: Sequence[LinearShape],
    device: torch.device,
    progress: Callable[[str, float], None] | None,
    max_rows: int = max(_ROWS),
) -> tuple[str, ...]:
    """Measure what the table lacks; returns sentences for the record."""
    rows = tuple(count for count in _ROWS if count <= max_rows)
    wanted = TuneShapes(linears=tuple(dict.fromkeys(shapes)), rows=rows)
    return (_sentence(tune_all(wanted, cache_dir("kernels"), device, progress)),)


def tune_attention(context: TuneContext) -> dict[str, Any]:
    """Measure what the table lacks for every distinct shape of layer; returns facts for the record."""
    dtype = getattr(torch, context.dtype)
    shapes = [
        ModelShape(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            block_size=context.block_size,
            dtype=dtype,
            # Rows this wide are read in one case only: keys that hold their values.
            shared_values=max(layer.key_dim, layer.value_dim) > MAX_HEAD_DIM,
        )
        for layer in context.layers
    ]
    wanted = TuneShapes(
        attention=tuple(dict.fromkeys(shapes)),
        max_context_len=context.max_model_len,
        max_num_seqs=context.max_num_seqs,
    )
    report = tune_all(wanted, context.folder, torch.device(context.device), context.progress)
    return {"measured": list(report.measured), "files": [path.name for path in report.files]}


def _sentence(report: TuneReport) -> str:
    files = ", ".join(path.name for path in report.files)
    return f"launch parameters: {len(report.measured)} measured now, kept in {files}"
