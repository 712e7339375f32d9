"""What recurrent layers carry from token to token, in and out of transformers' own cache objects.

Used where a model exists already: by the child that resolves configs, and by the engine. transformers is imported
when a carrier is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

#: Keyword of the cache, by age of the release: 5.24; Mamba's and everybody else's in 5.17.
_CACHE_KEYWORDS = ("cache", "cache_params", "past_key_values")

#: Per layer what it carries, by name, batch dimension first, in a fixed order.
Carried = Mapping[int, Mapping[str, Any]]


class CacheCarrier:
    """States of models that keep them in the layers of a `DynamicCache` (Mamba and most hybrids).

    Attention layers of that cache hand keys and values through and hold none.
    """

    #: Whether one forward may continue several sequences.
    batched = True

    def __init__(self, model: Any, keyword: str) -> None:
        self._config, self._keyword = model.config, keyword

    def arguments(self, carried: Carried | None) -> dict[str, Any]:
        """Keywords for one forward that starts from `carried`, or from nothing."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._config)
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            if hasattr(layer, "update"):
                layer.update = _hand_through
            for name, tensor in (carried or {}).get(index, {}).items():
                _put(layer, name, tensor)
        return {self._keyword: cache, "use_cache": True}

    def collect(self, arguments: Mapping[str, Any], output: Any) -> Carried:
        """What the forward left behind."""
        layers = arguments[self._keyword].layers
        found = {index: dict(_states(layer)) for index, layer in enumerate(layers) if hasattr(layer, "conv_states")}
        return {index: states for index, states in found.items() if states}

    def attending(self) -> frozenset[int]:
        """Layers that call attention, by the kind of their cache layer."""
        from transformers import DynamicCache

        layers = DynamicCache(config=self._config).layers
        return frozenset(i for i, layer in enumerate(layers) if hasattr(layer, "update") and not _is_dummy(layer))


class RwkvCarrier:
    """RWKV's `state`: tensors `[B, hidden, num_layers]`, all layers at once; they are filed under layer 0.

    transformers adds the last token's `[B, hidden]` to `[B, 1, hidden]`, which mixes the rows of a larger batch.
    """

    batched = False

    def arguments(self, carried: Carried | None) -> dict[str, Any]:
        if carried is None:
            return {"use_cache": True}
        return {"use_cache": True, "state": list(carried[0].values())}

    def collect(self, arguments: Mapping[str, Any], output: Any) -> Carried:
        return {0: {f"state{number}": tensor for number, tensor in enumerate(output.state)}}

    def attending(self) -> frozenset[int]:
        return frozenset()


Carrier = CacheCarrier | RwkvCarrier


def carrier_of(model: Any) -> Carrier | None:
    """How this model takes its states; `None` when it takes no cache object at all."""
    parameters = inspect.signature(model.forward).parameters
    if "state" in parameters:
        return RwkvCarrier()
    keyword = next((name for name in _CACHE_KEYWORDS if name in parameters), None)
    return CacheCarrier(model, keyword) if keyword else None


def _hand_through(keys: Any, values: Any, *positional: Any, **named: Any) -> tuple[Any, Any]:
    return keys, values


def _is_dummy(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"


def _states(layer: Any) -> Iterator[tuple[str, Any]]:
    for kind in ("conv", "recurrent"):
        for number, tensor in getattr(layer, f"{kind}_states").items():
            if tensor is not None:
                yield f"{kind}{number}", tensor


def _put(layer: Any, name: str, tensor: Any) -> None:
    kind = name.rstrip("0123456789")
    number = int(name[len(kind) :])
    getattr(layer, f"{kind}_states")[number] = tensor
    getattr(layer, f"is_{kind}_states_initialized")[number] = True
    layer.has_previous_state[number] = True
    layer.dtype, layer.device = tensor.dtype, tensor.device
    if kind == "conv":
        layer.conv_kernel_size[number] = tensor.shape[-1]
