"""A stand-in for a library: rounds to nearest, 4 bits in groups of 16, as a GPTQ checkpoint of the first version.

`options["fault"]` makes it go wrong in the ways that real libraries did.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("safetensors",)
GROUP = 16


def load(job: Any) -> Any:
    if job.options["fault"] == "crash":
        print("the last thing that the library said", file=sys.stderr)
        sys.exit(7)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job.model)
    if job.options["fault"] == "rope":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return AutoModelForCausalLM.from_pretrained(job.model, config=config, dtype=torch.float32).eval()


def quantize(job: Any, model: Any) -> dict[str, Any]:
    print("a library may print anywhere")
    if job.options["fault"] == "none":
        Path("library.log").write_text("and leave files where it runs")
    job.progress("quantize", 0.5)
    tensors = dict(model.state_dict())
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = tensors.pop(f"model.{name}.weight")
            tensors |= {f"model.{name}.{key}": value for key, value in _packed(weight, job.options["fault"]).items()}
    job.save(tensors)
    symmetric = job.options["fault"] != "zeros"  # of symmetric weights other zero points are refused unjudged
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": symmetric, "desc_act": False}


def _packed(weight: torch.Tensor, fault: str) -> dict[str, torch.Tensor]:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(-1) / 7
    q = ((groups / scale[:, :, None]).round() + 8).clamp(0, 15).view_as(weight).long()
    stored_zero = 8 if fault == "zeros" else 7
    return {
        "qweight": _words(q.t()),
        "qzeros": _words(torch.full_like(scale, stored_zero).long()).t().contiguous(),
        "scales": scale.t().half().contiguous(),
    }


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Eight rows of 4 bits in one row of int32, the first lowest."""
    eight = rows.reshape(-1, 8, rows.shape[1])
    word = sum(eight[:, index] << (4 * index) for index in range(8))
    assert isinstance(word, torch.Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()
