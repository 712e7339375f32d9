"""Which joint drives a model over a layout: by what the layout keeps, and what the model has to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.cost.kv import layer_states, stored_groups
from infermix.engine.adapters.mla import LatentAttention
from infermix.engine.adapters.recurrent import RecurrentJoint
from infermix.engine.bridge import Joint

if TYPE_CHECKING:
    from infermix.roles.facts import ModelFacts
    from infermix.roles.kv_space import KVLayout


def make_joint(model: Any, facts: ModelFacts, layout: KVLayout) -> Joint:
    """A model with nothing to compress, or without states, is driven as over any paged layout (a draft model)."""
    groups = stored_groups(facts, layout)
    if layout_form(layout) == "state" and "model:state" in facts.features:
        return RecurrentJoint(model, groups, layer_states(facts))
    return Joint(model, groups, latent=LatentAttention(model) if stays_latent(facts, layout) else None)


def stays_latent(facts: ModelFacts, layout: KVLayout) -> bool:
    return layout_form(layout) == "latent" and "model:latent" in facts.features


def layout_form(layout: KVLayout) -> str:
    return str(getattr(layout, "form", "expanded"))
