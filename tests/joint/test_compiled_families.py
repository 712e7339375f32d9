"""Transform `compile` over the families of the joint: the model's logits, and no compiling after the first walk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.self_check import collect_reference, self_check
from infermix.engine.warm import num_compiles
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.transform import TransformContext
from infermix.toolkit.conformance import example_model
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.kv_paged import PagedLayout
from tiny_models import tiny_model

#: Rotary, learned positions, windows with soft caps, sinks with experts, experts, latent attention, merged q/k/v.
FAMILIES = ("qwen3", "opt", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "phi3")


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_family(family: str) -> None:
    torch._dynamo.reset()
    model = tiny_model(family)
    plain = Joint(model)
    plain.detach()
    first = collect_reference(model, plain)
    second = collect_reference(model, plain, lengths=(9, 3, 22, 40), seed=4)
    component = load_catalogue().find(Role.TRANSFORM, "compile").component
    facts = replace(example_model(), layers=example_model().layers[:1] * len(plain.layers))
    report = component.build(component.options(backend="eager"), None).apply(
        model, TransformContext(device="cpu", dtype="float32", seed=0, facts=facts, max_num_seqs=8)
    )
    assert report.replaced["decoder layer"] == len(plain.layers)
    with torch.inference_mode():
        joint = Joint(model)
        attention, layout, cpu = EagerAttention(), PagedLayout(4), torch.device("cpu")
        self_check(model, joint, attention, layout, device=cpu, dtype=torch.float32, reference=first)
        compiled = num_compiles()
        self_check(model, joint, attention, layout, device=cpu, dtype=torch.float32, reference=second)
    assert num_compiles() == compiled
