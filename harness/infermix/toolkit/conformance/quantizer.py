"""Conformance of quantizers: a small model with a tied head, before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infermix.roles.component import Component
from infermix.roles.quantizer import Quantizer, QuantizerContext
from infermix.toolkit.conformance.component import machine_for

#: Wide enough for groups of 256 weights.
WIDTH = 256


class _SmallModel(nn.Module):
    """Embedding, two linears with and without bias, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(48, WIDTH)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, 48, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        return self.lm_head(hidden + self.down_proj(torch.tanh(self.up_proj(hidden))))


def check_quantizer(
    component: Component, options: Any = None, *, device: str | None = None, dtype: str = "float32"
) -> float:
    """Apply it to a small model; returns the relative error of the logits (0 for a lossless one).

    Runs on `device`, by default on CUDA where there is one and the quantizer takes it.

    Checks the report against the model: kernels name real modules, bits per weight are those of `weight_bits` plus
    at most one bit of scales, the tied head stays tied, and the error is what so many bits allow.
    """
    options = component.options() if options is None else options
    device = machine_for(component, options).device if device is None else device
    quantizer: Quantizer = component.build(options, None)
    assert isinstance(dict(quantizer.load_arguments()), dict)
    torch.manual_seed(0)
    model = _SmallModel().eval().to(device, getattr(torch, dtype))
    ids = torch.arange(48, device=device)
    with torch.no_grad():
        before = model(ids).double()
        report = quantizer.apply(model, QuantizerContext(device=device, dtype=dtype))
        after = model(ids).double()
    modules = dict(model.named_modules())
    unknown = [name for name in report.kernels if name not in modules]
    assert not unknown, f"the report names modules that the model does not have: {unknown}"
    assert model.lm_head.weight is model.embed_tokens.weight, "the tied head was torn from the embedding"
    _check_bits(component.weight_bits(options), report.bits_per_weight, component.name)
    error = ((after - before).norm() / before.norm()).item()
    if component.lossless(options):
        assert error == 0, f"{component.name} says lossless and changes the logits by {error:.3g}"
    assert error <= 2.0 ** (1 - report.bits_per_weight), (
        f"{report.bits_per_weight:.2f} bits, yet an error of {error:.3g}"
    )
    return error


def _check_bits(declared: float | None, measured: float, name: str) -> None:
    assert measured > 0, f"{name} reports {measured} bits per weight"
    if declared is not None:
        assert declared <= measured + 1e-9 <= declared + 1, f"{name} declares {declared} bits and has {measured}"
