"""Launch parameters are measured in set-up, where the experiment asks for it, on a GPU, once per machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.plugins import Catalogue
from infermix.roles.attention import LayerSpec, TuneContext
from infermix.roles.component import Role

Build = Callable[..., Any]


def test_nothing_is_measured_on_a_cpu(
    build_engine: Build, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(catalogue.find(Role.ATTENTION, "sdpa").component.build(None, None))

    def tune(self: Any, context: TuneContext) -> dict[str, Any]:
        raise AssertionError("tuned on a CPU")

    monkeypatch.setattr(kind, "tune", tune, raising=False)
    engine = build_engine(engine={"tune": "auto"})
    assert "tune" not in engine.report().setup_s


def test_attention_hands_over_every_shape_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = pytest.importorskip("infermix_triton.measured")
    from infermix_triton.attention import TritonAttention

    asked = []

    def tune_all(shapes: Any, folder: Path, device: torch.device, progress: Any) -> Any:
        asked.append((shapes, folder, device))
        return measured.TuneReport(measured=["attention something"], files=[tmp_path / "attention-x.json"])

    monkeypatch.setattr(measured, "tune_all", tune_all)
    layers = tuple(LayerSpec(index, 0, 8, 2, 64, 64, scale=0.1, window=(None, 9)[index % 2]) for index in range(4))
    context = TuneContext(
        layers=layers, block_size=16, device="cuda", dtype="bfloat16", max_num_seqs=32, max_model_len=2048,
        folder=tmp_path,
    )  # fmt: skip
    facts = TritonAttention(tmp_path).tune(context)
    ((shapes, folder, device),) = asked
    (shape,) = shapes.attention
    assert (shape.num_heads, shape.num_kv_heads, shape.block_size, shape.dtype) == (8, 2, 16, torch.bfloat16)
    assert (shapes.max_context_len, shapes.max_num_seqs, folder, device.type) == (2048, 32, tmp_path, "cuda")
    assert facts == {"measured": ["attention something"], "files": ["attention-x.json"]}


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_second_engine_finds_what_the_first_measured(
    build_engine: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measured() -> list[str]:
        engine = build_engine(
            {"attention": "triton", "kv": "paged"}, {"tune": "auto"}, device="cuda", kv_memory_bytes=1 << 26
        )
        assert engine.report().setup_s["tune"] > 0
        return engine.report().executed["engine"]["tuned_attention"]["measured"]

    assert measured()
    assert measured() == []
