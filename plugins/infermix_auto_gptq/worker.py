"""Runs in the environment `auto-gptq`, imports only what is installed there; see `infermix.toolkit.isolated_worker`.

The library wants a GPU in three places that only move data; on a CPU they are pointed at it.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch

LIBRARIES = ("auto-gptq",)
_LAYER = re.compile(r"Start quantizing layer (\d+)/(\d+)")


class _Progress(logging.Handler):
    """The library tells where it is in its log only."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self._job = job

    def emit(self, record: logging.LogRecord) -> None:
        found = _LAYER.match(record.getMessage())
        if found:
            self._job.progress("quantize", (int(found[1]) - 1) / int(found[2]))


def quantize(job: Any, model: Any) -> dict[str, Any]:
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.modeling import _base
    from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP

    if job.device == "cpu":
        _base.CUDA_0 = torch.device("cpu")
        torch.cuda.synchronize = lambda *device: None
    _base.logger.addHandler(_Progress(job))
    config = BaseQuantizeConfig(**job.options)
    # `from_pretrained` of the library insists on CUDA, its constructor does not.
    wrapped = GPTQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](model, False, config)
    wrapped.quantize([_example(sample) for sample in job.samples], cache_examples_on_gpu=False)
    job.progress("save", 0.0)
    job.save({name: _stored(name, tensor) for name, tensor in wrapped.model.state_dict().items()})
    return {
        "quant_method": "gptq", "bits": config.bits, "group_size": config.group_size, "sym": config.sym,
        "desc_act": config.desc_act, "lm_head": False, "checkpoint_format": "gptq",
    }  # fmt: skip


def _example(sample: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor([sample]), "attention_mask": torch.ones(1, len(sample), dtype=torch.long)}


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The format's scales are 16 bits wide; the model ran in fp32."""
    return tensor.half() if name.endswith(".scales") else tensor
