"""Kernel linears: interpreted in a process of their own, and through every quantizer on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model


def test_interpreted_kernels_match_their_meaning() -> None:
    pytest.importorskip("triton")
    file = Path(__file__).parent / "kernels_interpreted.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["gptq", "awq", "smoothquant", "fp8", "llm_int8", "nf4", "hqq"])
def test_quantizers_use_the_kernels_on_a_gpu(name: str) -> None:
    from infermix.plugins import load_catalogue
    from infermix.roles.component import Role

    component = load_catalogue().find(Role.QUANTIZER, name).component
    samples = torch.randint(0, 90, (4, 32), generator=torch.Generator().manual_seed(0)).tolist()
    model = calibration_model("llama").to("cuda", torch.bfloat16)
    context = QuantizerContext(device="cuda", dtype="bfloat16", calibration=lambda: samples)
    report = component.build(component.options(), None).apply(model, context)
    assert all(kernel.startswith("triton") for kernel in report.kernels.values()), report.kernels
    assert torch.isfinite(model(input_ids=torch.tensor(samples, device="cuda")).logits).all()
