"""A decoder's own Python per step, for 1 and 64 sequences; the aim is under 0.3 ms and under 1 ms.

The clock of these benchmarks moves only while a decoder works outside of forwards and sampling, so that a tiny model
on a CPU shows it (`limits/decoder_overhead.py`). `limits/decoders.py` measures the same on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "limits"))

from decoder_overhead import DECODERS, OwnTime, constrain, write_random_heads
from decoders import build, submit

WIDTH, VOCAB_SIZE, WARM_STEPS, STEPS = 64, 4096, 8, 24
#: The tiny model has fewer layers to skip than those of the limits.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **DECODERS,
    "self_speculative": ("self_speculative", {"skip_layers": (1,)}),
}
MEASURABLE = [name for name in OPTIONS if name != "constrained" or find_spec("xgrammar")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and a vocabulary in which random text seldom repeats; draft heads beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_random_heads(folder, WIDTH, VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module", params=MEASURABLE)
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Any]:
    built = build(str(model), "cpu", OPTIONS[request.param], 64, 0, "off", model)
    if request.param == "constrained":
        constrain(built)
    yield built
    built.close()


@pytest.fixture(params=[1, 64])
def clock(request: pytest.FixtureRequest, engine: Any) -> Iterator[OwnTime]:
    """Of the engine with so many sequences running; the benchmark that is set up next goes by it."""
    engine.reset()
    submit(engine, request.param, 64, 16 * (WARM_STEPS + STEPS))
    for _ in range(WARM_STEPS):
        engine.step()
    own = OwnTime(engine)
    request.node.add_marker(pytest.mark.benchmark(timer=own))
    yield own
    own.detach()


def test_overhead_of_a_step(engine: Any, clock: OwnTime, benchmark: Any) -> None:
    benchmark.pedantic(engine.step, rounds=STEPS, iterations=1)
    assert engine.has_work, "steps without work were timed"
    assert clock() > 0
