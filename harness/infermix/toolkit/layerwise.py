"""Decoder layers one after the other over calibration samples, each fed by what the layers before it are by then.

Activations of all samples are kept for one layer only (on the CPU when the model is on a GPU), so the peak is the
model plus one layer's activations. A layer that was changed between two steps is replayed as it is now: the next one
sees quantized inputs (Frantar et al., "GPTQ", section 4).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infermix.errors import Unsupported, UserError

Layers = Sequence[tuple[str, nn.Module]]
_HIDDEN = "hidden_states"
_CHECK_TOKENS = 16
#: Replayed layers compute the same numbers in the same order; 16-bit products may still differ by their kernel.
_CHECK_ERROR = 1e-2


@dataclass(frozen=True)
class _Call:
    """Arguments of a layer besides the hidden states, and how it wraps its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positional: bool

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        if self.positional:
            return _first(module(hidden, *self.args, **self.kwargs))
        return _first(module(*self.args, **{_HIDDEN: hidden}, **self.kwargs))


@dataclass
class CalibrationLayer:
    """One decoder layer with its inputs. `name` is its dotted name, `module` may be changed by whoever calibrates."""

    index: int
    num_layers: int
    name: str
    module: nn.Module
    _hidden: list[Tensor]
    _calls: Sequence[_Call]
    _device: torch.device

    def run(self, each: Callable[[Tensor], None] | None = None) -> None:
        """Forward of every sample; attach hooks to see activations. `each` gets the outputs `[1, T, hidden]`."""
        for index in range(len(self._hidden)):
            output = self.output(index)
            if each is not None:
                each(output)

    @property
    def num_samples(self) -> int:
        return len(self._hidden)

    def input(self, sample: int) -> Tensor:
        """`[1, T, hidden]` of one sample, as the layer gets it."""
        return self._hidden[sample].to(self._device)

    def output(self, sample: int) -> Tensor:
        """`[1, T, hidden]` of one sample, through the layer as it is now."""
        with torch.no_grad():
            return self._calls[sample].run(self.module, self.input(sample))

    def _advance(self) -> None:
        """Replace the inputs by the outputs: the inputs of the next layer."""
        for index in range(len(self._hidden)):
            self._hidden[index] = _parked(self.output(index))


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every decoder layer, in order. Raises `Unsupported` when there is no such list."""
    config: Any = getattr(model, "config", None)
    if config is None:
        raise Unsupported(f"{type(model).__name__} is no transformers model: its layers are not known")
    number = config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return [(f"{name}.{index}", layer) for index, layer in enumerate(module)]
    raise Unsupported(f"{type(model).__name__} has no list of {number} decoder layers: it cannot be calibrated")


def walk_layers(
    model: nn.Module, samples: Sequence[Sequence[int]], progress: Callable[[str, float], None] | None = None
) -> Iterator[CalibrationLayer]:
    """Every decoder layer with the inputs it gets from the layers before it, as they are when it is reached.

    Raises `UserError` without samples, `Unsupported` for a model whose layers need more than the hidden states of
    the one before (found by replaying a short piece before anything is changed).
    """
    if not samples:
        raise UserError("there are no calibration samples", key="parts.quantizer.calibration.num_samples")
    layers = decoder_layers(model)
    device = next(model.parameters()).device
    sizes = _checked_sizes(model, layers, torch.tensor([samples[0][:_CHECK_TOKENS]], device=device))
    hidden: list[Tensor] = []
    calls: list[list[_Call]] = []
    for sample in samples:
        found = _record(model, layers, sizes, torch.tensor([sample], device=device))
        hidden.append(_parked(found.hidden))
        calls.append(_shared_calls(found.calls, calls[0]) if calls else found.calls)
    for index, (name, module) in enumerate(layers):
        own = [sample_calls[index] for sample_calls in calls]
        layer = CalibrationLayer(index, len(layers), name, module, hidden, own, device)
        yield layer
        if index + 1 < len(layers):
            layer._advance()
        if progress is not None:
            progress("calibrate", (index + 1) / len(layers))


@dataclass
class _Recorded:
    hidden: Tensor
    calls: list[_Call]


def _record(model: nn.Module, layers: Layers, sizes: Sequence[int], ids: Tensor) -> _Recorded:
    """What the first layer gets, and the other arguments of every layer; no layer is computed.

    `sizes`: elements of the tuple that a layer returns, 0 for a plain tensor.
    """
    calls: list[_Call] = []
    hidden: list[Tensor] = []

    def record(size: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            positional = bool(args) and isinstance(args[0], Tensor)
            value = args[0] if positional else kwargs.pop(_HIDDEN)
            calls.append(_Call(args[1:] if positional else args, kwargs, positional))
            hidden.append(value)
            return (value, *[None] * (size - 1)) if size else value

        return forward

    with _forwards_replaced([module for _, module in layers], [record(size) for size in sizes]):
        _forward(model, ids)
    if len(calls) != len(layers):
        raise Unsupported(f"{type(model).__name__} made {len(calls)} calls of {len(layers)} layers: not calibrated")
    return _Recorded(hidden[0], calls)


@contextmanager
def _forwards_replaced(modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module, forward in zip(modules, forwards, strict=True):
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, previous in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if previous is not None:
                module.__dict__["forward"] = previous


def _forward(model: nn.Module, ids: Tensor) -> None:
    """One sequence from position 0; logits of the last token only, where the model allows it."""
    takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, **({"logits_to_keep": 1} if takes_rows else {}))


def _checked_sizes(model: nn.Module, layers: Layers, ids: Tensor) -> list[int]:
    """How every layer wraps its result, having made sure that replayed layers compute what the model computes."""
    outputs: list[Any] = []
    hooks = [module.register_forward_hook(lambda _, __, output: outputs.append(output)) for _, module in layers]
    try:
        _forward(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(layers):
        raise Unsupported(f"{type(model).__name__} made {len(outputs)} calls of {len(layers)} layers: not calibrated")
    _require_finite(layers, outputs)
    sizes = [len(output) if isinstance(output, tuple) else 0 for output in outputs]
    recorded = _record(model, layers, sizes, ids)
    hidden = recorded.hidden
    with torch.no_grad():
        for call, (_, module) in zip(recorded.calls, layers, strict=True):
            hidden = call.run(module, hidden)
    expected = _first(outputs[-1]).double()
    error = float((hidden.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error <= _CHECK_ERROR:
        raise Unsupported(
            f"the layers of {type(model).__name__} do not depend on the one before alone: replayed one by one, their "
            f"output differs by {error:.1e}"
        )
    return sizes


def _require_finite(layers: Layers, outputs: Sequence[Any]) -> None:
    for (name, _), output in zip(layers, outputs, strict=True):
        if not bool(_first(output).isfinite().all()):
            raise UserError(
                f"the outputs of {name} are not finite on the calibration samples",
                key="parts.quantizer.calibration",
                hint="its weights or those before it, or the dtype, are at fault",
            )


def _first(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found


def _parked(hidden: Tensor) -> Tensor:
    """Where activations wait: the CPU."""
    return hidden.detach().to("cpu")


def _shared_calls(calls: Sequence[_Call], like: Sequence[_Call]) -> list[_Call]:
    """Masks and position embeddings of equal samples are kept once."""
    return [
        _Call(_shared(call.args, old.args), _shared(call.kwargs, old.kwargs), call.positional)
        for call, old in zip(calls, like, strict=True)
    ]


def _shared(new: Any, old: Any) -> Any:
    if new is old:
        return old
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        same = new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old)
        return old if same else new
    if isinstance(new, tuple | list) and isinstance(old, tuple | list) and len(new) == len(old):
        return type(new)(_shared(a, b) for a, b in zip(new, old, strict=True))
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: _shared(value, old.get(key)) for key, value in new.items()}
    return new
