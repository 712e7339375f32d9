"""Running layers on random input and comparing what they compute on the way, not only what comes out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infermix_triton.fuse_find import relative_error
from infermix_triton.fused_layer import Stream

#: The name under which transformers knows the attention function of this file.
RECORDING = "infermix_recorded"


@dataclass(slots=True)
class Recorder:
    """The last attention call: tensors `[1, H, T, D]` and the keywords of the layer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """What one layer computed, by name: query, key, value, o and down products, and its output."""

    steps: Mapping[str, Tensor]
    given: Mapping[str, Any]

    def errors(self, expected: Trace) -> dict[str, float]:
        return {name: relative_error(self.steps[name], tensor) for name, tensor in expected.steps.items()}


@contextmanager
def recording(model: Any) -> Iterator[None]:
    """Attention of `model` is computed here meanwhile, plainly, causal, without windows, caps and sinks."""
    from transformers import AttentionInterface

    AttentionInterface.register(RECORDING, _attend)
    previous = model.config._attn_implementation
    model.set_attn_implementation(RECORDING)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def trace(layer: nn.Module, o: nn.Module, down: nn.Module, hidden: Tensor, angles: Any) -> Trace:
    """Run `layer` on `hidden [1, T, N]`; `o` and `down` are its linears whose results are kept."""
    recorder = Recorder()
    steps: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, arguments, result: steps.__setitem__(name, result.reshape(hidden.shape).clone())

    hooks = [o.register_forward_hook(keep("attention output")), down.register_forward_hook(keep("MLP output"))]
    try:
        out = layer(hidden, attention_mask=None, position_embeddings=angles, recorder=recorder)
    finally:
        for hook in hooks:
            hook.remove()
    if isinstance(out, Stream):
        out = (out.delta + out.residual).view(hidden.shape)
    elif isinstance(out, tuple):
        out = out[0]
    return Trace({**recorder.tensors, **steps, "layer output": out}, recorder.given)


def worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """The step with the largest error; one that is not a number is larger than any."""
    return max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    recorder: Recorder = given.pop("recorder")
    recorder.tensors = {"query": query.clone(), "key": key.clone(), "value": value.clone()}
    recorder.given = given
    num_tokens, repeats = query.shape[2], query.shape[1] // key.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()
    keys, values = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query.float() @ keys.float().transpose(2, 3) * given["scaling"]
    weights = F.softmax(scores.masked_fill(~causal, -math.inf), dim=-1)
    return (weights @ values.float()).to(query.dtype).transpose(1, 2).contiguous(), None
