"""A model with some decoder layers left out that shares every tensor with the model it comes from."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported
from infermix.toolkit.layerwise import decoder_layers

if TYPE_CHECKING:
    from infermix.roles.facts import ModelFacts
    from torch import nn

#: Matrices that are there once, however many layers a model has.
_OUTSIDE_LAYERS = frozenset({"lm_head", "embedding"})


def keep_layers(model: nn.Module, kept: Seq[int]) -> nn.Module:
    """A copy of the modules without their tensors: layers `kept` alone, numbered from 0, attention of its own kind.

    Nothing of `model` changes, and what later changes a weight of one changes it in both.
    """
    name = decoder_layers(model)[0][0].rpartition(".")[0]
    config = _shorter(model.config, kept)
    twin = _Twins(model.config, config).of(model)
    layers = twin.get_submodule(name)
    chosen = [layers[index] for index in kept]
    layers._modules = {str(index): layer for index, layer in enumerate(chosen)}
    for index, layer in enumerate(chosen):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = index  # type: ignore[assignment]
    twin.set_attn_implementation("eager")  # type: ignore[operator]
    return twin


def facts_of_kept(facts: ModelFacts, kept: Seq[int]) -> ModelFacts:
    """The facts of such a model; matrices are counted as if every layer had an equal share of each kind.

    Raises `Unsupported` where a layer that stays needs one that does not.
    """
    place = {old: new for new, old in enumerate(kept)}
    layers = []
    for old in kept:
        layer = facts.layers[old]
        if layer.states:
            raise Unsupported("layers of a model with recurrent states cannot be skipped")
        if layer.kv_from is not None and layer.kv_from not in place:
            raise Unsupported(f"layer {old} reads the keys of layer {layer.kv_from}, which would be skipped")
        layers.append(layer if layer.kv_from is None else replace(layer, kv_from=place[layer.kv_from]))
    matrices = tuple(
        matrix
        if matrix.kind in _OUTSIDE_LAYERS
        else replace(matrix, count=round(matrix.count * len(kept) / facts.num_layers))
        for matrix in facts.matrices
    )
    return replace(facts, layers=tuple(layers), matrices=matrices)


def _shorter(config: Any, kept: Seq[int]) -> Any:
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        text.layer_types = [kinds[index] for index in kept]
    text.num_hidden_layers = len(kept)
    return shorter


class _Twins:
    """One copy of each module of a tree, parameters and buffers shared, with another config."""

    def __init__(self, config: Any, other: Any) -> None:
        pairs = [(config, other), (config.get_text_config(decoder=True), other.get_text_config(decoder=True))]
        self._configs = {id(old): new for old, new in pairs}
        self._made: dict[int, Any] = {}

    def of(self, module: Any) -> Any:
        if id(module) in self._made:
            return self._made[id(module)]
        twin = self._made[id(module)] = object.__new__(type(module))
        for name, value in module.__dict__.items():
            twin.__dict__[name] = self._own(value, module, twin)
        twin.__dict__["_modules"] = {
            name: None if child is None else self.of(child) for name, child in module._modules.items()
        }
        return twin

    def _own(self, value: Any, module: Any, twin: Any) -> Any:
        if inspect.ismethod(value) and value.__self__ is module:
            return types.MethodType(value.__func__, twin)
        if isinstance(value, dict):
            return copy.copy(value)  # of its own kind: hooks are held weakly, which a plain dict does not allow
        return self._configs.get(id(value), value)
