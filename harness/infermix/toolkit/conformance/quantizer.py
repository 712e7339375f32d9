"""Conformance of quantizers: a small model with a tied head, before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infermix.roles.component import Component
from infermix.roles.quantizer import Quantizer, QuantizerContext
from infermix.toolkit.calibration import CalibratedOptions
from infermix.toolkit.conformance.component import machine_for

#: Wide enough for groups of 256 weights.
WIDTH = 256
_VOCAB = 48


class _SmallModel(nn.Module):
    """Embedding, two linears with and without bias, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(_VOCAB, WIDTH)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, _VOCAB, bias=False)
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
    calibrates = isinstance(options, CalibratedOptions) and options.calibrates
    model = (calibration_model("llama") if calibrates else _small_model()).to(device, getattr(torch, dtype))
    with torch.no_grad():
        before = _logits(model, device)
    report = quantizer.apply(model, _context(device, dtype, calibrates))
    with torch.no_grad():
        after = _logits(model, device)
    modules = dict(model.named_modules())
    unknown = [name for name in report.kernels if name not in modules]
    assert not unknown, f"the report names modules that the model does not have: {unknown}"
    embedding = next(module for module in modules.values() if isinstance(module, nn.Embedding))
    head: Any = modules["lm_head"]
    assert head.weight is embedding.weight, "the tied head was torn from the embedding"
    _check_bits(component.weight_bits(options), report.bits_per_weight, component.name)
    error = ((after - before).norm() / before.norm()).item()
    if component.lossless(options):
        assert error == 0, f"{component.name} says lossless and changes the logits by {error:.3g}"
    # A path through two decoder layers meets four times as many linears as one through the small model, and methods
    # that decide one weight after the other vary by 7 % with the rounding of their sums (2 bits, 1 and 2 threads).
    precision = report.precision_bits or report.bits_per_weight
    allowed = 2.0 ** (1 - precision) * (2.2 if calibrates else 1) + 2 * torch.finfo(getattr(torch, dtype)).eps
    assert error <= allowed, f"{report.bits_per_weight:.2f} bits, yet an error of {error:.3g}"
    return error


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return _SmallModel().eval()


def _context(device: str, dtype: str, calibrates: bool) -> QuantizerContext:
    samples = torch.randint(_VOCAB, (4, 32), generator=torch.Generator().manual_seed(1)).tolist()
    return QuantizerContext(device=device, dtype=dtype, calibration=(lambda: samples) if calibrates else None)


def _logits(model: nn.Module, device: str) -> Tensor:
    """Of a fixed input, fp64, without gradients."""
    ids = torch.arange(_VOCAB, device=device)
    if isinstance(model, _SmallModel):
        return model(ids).double()
    return model(input_ids=ids[None], use_cache=False).logits[0].double()


def calibration_model(family: str) -> Any:
    """A two-layer random decoder, fp32, tied head, that groups of 256 weights fit; for parts that calibrate."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 128}
    if family != "gpt2":
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
                 "max_position_embeddings": 128}  # fmt: skip
    kind: Any = CONFIG_MAPPING[family]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        config = kind(
            vocab_size=96, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval().requires_grad_(False)


def _check_bits(declared: float | None, measured: float, name: str) -> None:
    assert measured > 0, f"{name} reports {measured} bits per weight"
    if declared is not None:
        assert declared - 1e-9 <= measured <= declared + 1 + 1e-9, (
            f"{name} declares {declared} bits and has {measured}"
        )
