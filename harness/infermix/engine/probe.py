"""The guards of the joint: what attention layers hand over, and whether that is all there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported
from infermix.roles.attention import LayerSpec
from infermix.roles.families import expects_window
from infermix.roles.kv_space import KVGroup

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Keywords that say nothing about which keys a query sees, or are handled.
_HANDLED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
_HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"})
_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {"dropout": (0, 0.0), "is_causal": (True,)}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one call of the attention function."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    given: Mapping[str, Any]


@dataclass(slots=True)
class LayerProbe:
    """Collects one `LayerSpec` per attention call of one forward; refuses what the batch cannot express.

    `causal` is what the config says of the model: no call tells.
    """

    causal: bool = True
    specs: dict[int, LayerSpec] = field(default_factory=dict)
    #: Keys and values of this forward by layer; held, so that no later tensor takes the place of an earlier one.
    handed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def see(self, call: AttentionCall) -> None:
        """Check one call. Raises `Unsupported`."""
        layer_idx = getattr(call.module, "layer_idx", None)
        name = type(call.module).__name__
        if not isinstance(layer_idx, int) or layer_idx < 0:
            raise Unsupported(f"{name} has no layer index (layer_idx = {layer_idx!r})")
        if layer_idx in self.specs:
            raise Unsupported(f"{name} calls attention twice for layer {layer_idx}: its keys would be overwritten")
        if call.mask is not None:
            raise Unsupported(f"{name} (layer {layer_idx}) relies on an attention mask of its own")
        queries, keys, values = (tensor.shape[2] for tensor in (call.query, call.key, call.value))
        if (keys, values) != (queries, queries):
            raise Unsupported(f"{name} (layer {layer_idx}) hands over {keys} keys for {queries} new tokens")
        _refuse_unknown(name, layer_idx, call.given)
        self.specs[layer_idx] = replace(_spec(layer_idx, call), kv_from=self._owner(call), causal=self.causal)
        self.handed[layer_idx] = call.key, call.value
        self._require_shared_window(layer_idx, name)

    def _owner(self, call: AttentionCall) -> int | None:
        """The earlier layer whose very keys and values this one was handed, for models that share them."""
        return next((i for i, (key, value) in self.handed.items() if key is call.key and value is call.value), None)

    def _require_shared_window(self, layer_idx: int, name: str) -> None:
        spec = self.specs[layer_idx]
        if spec.kv_from is not None and self.specs[spec.kv_from].window != spec.window:
            raise Unsupported(
                f"{name} (layer {layer_idx}, window {spec.window}) reads the keys of layer {spec.kv_from}, whose "
                f"window is {self.specs[spec.kv_from].window}"
            )

    def require_layers(self, num_layers: int, model_name: str) -> None:
        """Every layer must have called attention exactly once. Raises `Unsupported`."""
        missing = [index for index in range(num_layers) if index not in self.specs]
        if missing or len(self.specs) != num_layers:
            raise Unsupported(
                f"{model_name} called the attention function for {len(self.specs)} of {num_layers} layers "
                f"(first one missing: {missing[0] if missing else 'none'}): the others attend on their own"
            )

    def require_windows(self, config: Mapping[str, Any], model_name: str) -> None:
        """A window in the config must have reached the attention function. Raises `Unsupported`."""
        kinds = config.get("layer_types")
        lost = [
            index
            for index, spec in self.specs.items()
            if spec.window is None and (kinds is None or kinds[index] == "sliding_attention")
        ]
        if lost and (kinds is not None or len(lost) == len(self.specs)) and expects_window(config):
            raise Unsupported(f"{model_name} applies the sliding window of layer {lost[0]} in its mask alone")

    def require_same(self, layers: Mapping[int, LayerSpec]) -> None:
        """The calls of this forward must match the known specs. Raises `Unsupported`."""
        if self.specs.keys() != layers.keys():
            raise Unsupported(f"attention ran in layers {sorted(self.specs)}, expected {sorted(layers)}")
        for index, spec in self.specs.items():
            known, seen = _values(layers[index]), _values(spec)
            if known != seen:
                raise Unsupported(f"layer {index} now hands over {seen}, at construction it was {known}")


def layer_specs(
    probe: LayerProbe, expected: tuple[KVGroup, ...] | None, *, shared_values: bool = False
) -> tuple[Mapping[int, LayerSpec], tuple[KVGroup, ...]]:
    """Specs with their KV group filled in, and the groups in order of their first layer.

    Raises `Unsupported` when `expected` differs: memory predictions and pools would be wrong.
    """
    members: dict[tuple[int, int, int, int | None], list[int]] = {}
    for index in sorted(probe.specs):
        spec = probe.specs[index]
        if spec.kv_from is None:
            members.setdefault((spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.window), []).append(index)
    groups = tuple(KVGroup(tuple(layers), *key, shared_values=shared_values) for key, layers in members.items())
    if expected is not None and set(expected) != set(groups):
        raise Unsupported(f"the config says KV groups {expected}, the loaded model has {groups}")
    groups = groups if expected is None else expected
    group_of = {index: number for number, group in enumerate(groups) for index in group.layers}
    owner = {index: index if spec.kv_from is None else spec.kv_from for index, spec in probe.specs.items()}
    return {index: replace(spec, group=group_of[owner[index]]) for index, spec in probe.specs.items()}, groups


def _refuse_unknown(name: str, layer_idx: int, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if value is None or value is False or key in _HANDLED or key in _HARMLESS:
            continue
        if value not in _HARMLESS_VALUES.get(key, ()):
            raise Unsupported(f"{name} (layer {layer_idx}) hands over {key}={value!r}, which no part knows about")


def _spec(layer_idx: int, call: AttentionCall) -> LayerSpec:
    scaling = call.given.get("scaling")
    softcap = call.given.get("softcap")
    return LayerSpec(
        layer_idx=layer_idx,
        group=0,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        key_dim=call.key.shape[3],
        value_dim=call.value.shape[3],
        scale=call.query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=_window(call.given.get("sliding_window")),
        softcap=float(softcap) if softcap else None,
        sinks=call.given.get("s_aux"),
    )


def _window(given: Any) -> int | None:
    return int(given) if given is not None and given is not False and int(given) > 0 else None


def _values(spec: LayerSpec) -> dict[str, Any]:
    """Everything of a spec that can be compared; sinks by identity, the group not at all."""
    names = [name for name in LayerSpec.__dataclass_fields__ if name not in ("sinks", "group")]
    return {
        **{name: getattr(spec, name) for name in names},
        "sinks": id(spec.sinks) if spec.sinks is not None else 0,
    }
