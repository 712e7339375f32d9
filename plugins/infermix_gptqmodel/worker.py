"""Runs in the environment `gptqmodel`, imports only what is installed there; see `infermix.toolkit.isolated_worker`.

`options["config"]` are arguments of the library's `QuantizeConfig`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("gptqmodel",)


def load(job: Any) -> Any:
    """Through the library, which patches transformers when it is imported; it runs the model as we do."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.models import loader

    # It wants a tokenizer beside the weights; here the samples are token ids already.
    loader.load_hf_tokenizer = lambda *given, **more: None
    config = QuantizeConfig(**job.options["config"], device=job.device, offload_to_disk=False)
    # Its AWQ layers hold 16-bit tensors only.
    dtype = torch.float16 if job.options["half"] and job.dtype == "float32" else getattr(torch, job.dtype)
    return GPTQModel.from_pretrained(str(job.model), config, dtype=dtype, attn_implementation="eager")


def quantize(job: Any, model: Any) -> dict[str, Any]:
    _tell_layers(job, model)
    model.quantize([_example(sample) for sample in job.samples], batch_size=1)
    job.progress("save", 0.0)
    model.save(str(job.result))
    config: dict[str, Any] = json.loads((job.result / "config.json").read_text())["quantization_config"]
    for path in Path(job.result).iterdir():
        if ".safetensors" not in path.name:
            path.unlink()
    return {key: value for key, value in config.items() if key != "meta"}


def _tell_layers(job: Any, model: Any) -> None:
    """A progress that follows the decoder layer that runs."""
    lists = [module for module in model.model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(lists, key=len)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda module, given, at=index / len(layers): job.progress("quantize", at), prepend=True
        )


def _example(sample: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor([sample]), "attention_mask": torch.ones(1, len(sample), dtype=torch.long)}
