"""Every registered component goes through the checks of its role; one that cannot run here says why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from infermix.errors import Unsupported
from infermix.plugins import load_catalogue
from infermix.roles.component import Component, Registered, Role
from infermix.toolkit import conformance

CATALOGUE = load_catalogue()

#: More points of the option space than the defaults, where a component has them.
VARIANTS: dict[tuple[Role, str], list[dict[str, Any]]] = {
    (Role.KV, "latent"): [{"block_size": 5}],
    (Role.KV, "state"): [{"block_size": 4, "snapshots": 6}],
    (Role.KV, "paged"): [
        {"block_size": 1},
        {"block_size": 7},
        {"block_size": 64},
        {"block_size": 1, "prefix_cache": "hash"},
        {"block_size": 3, "prefix_cache": "hash"},
        {"block_size": 3, "prefix_cache": "radix"},
        {"block_size": 4, "prefix_cache": "radix", "keep_between_repeats": True},
    ],
    (Role.KV, "hybrid"): [{"block_size": b, "max_chunk_tokens": c} for b, c in ((1, 1), (2, 3), (4, 11), (64, 5))],
    (Role.KV, "windowed"): [{"block_size": b, "max_chunk_tokens": c} for b, c in ((1, 1), (2, 3), (4, 11))],
    (Role.KV, "sink_window"): [
        {"sink_tokens": s, "window": w, "block_size": b, "max_chunk_tokens": c}
        for s, w, b, c in ((0, 1, 1, 1), (4, 6, 1, 3), (3, 5, 2, 11), (4, 9, 4, 4))
    ],
    (Role.KV, "h2o"): [
        {"budget": n, "recent_fraction": r, "slack": s, "block_size": b}
        for n, r, s, b in ((1, 0.0, 0, 1), (7, 0.5, 2, 4), (12, 1.0, 5, 3))
    ],
    (Role.KV, "snapkv"): [
        {"budget": n, "observation_window": w, "pool_kernel": k, "block_size": b}
        for n, w, k, b in ((1, 1, 1, 1), (6, 2, 3, 4), (9, 3, 5, 2))
    ],
    (Role.KV, "quantized"): [{"dtype": "fp8"}, {"block_size": 7}, {"dtype": "fp8", "block_size": 1}],
    (Role.KV, "kivi"): [
        {"bits": 4, "group_size": 4, "residual_length": 12, "block_size": 8},
        {"bits": 2, "group_size": 4, "residual_length": 8, "block_size": 4},
        {"bits": 2},
    ],
    (Role.QUANTIZER, "rtn"): [
        {"bits": bits, "granularity": granularity, "group_size": 32, "symmetric": symmetric}
        for bits in (8, 4)
        for granularity in ("tensor", "channel", "group")
        for symmetric in (True, False)
    ],
    (Role.QUANTIZER, "gptq"): [
        {"bits": 8, "group_size": 0},
        {"bits": 4, "symmetric": False, "act_order": True},
        {"bits": 3, "act_order": True, "static_groups": True, "sequential": "operator"},
        {"bits": 2, "group_size": 32, "symmetric": False},
    ],
    (Role.QUANTIZER, "awq"): [{"bits": 3, "group_size": 32, "symmetric": True}, {"bits": 8, "clip": False}],
    (Role.QUANTIZER, "smoothquant"): [
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"activations": "tensor", "observer": "mse"},
        {"alpha": "search", "fold": "all"},
        {"alpha": "fit", "fold": "all"},
    ],
    (Role.QUANTIZER, "int8"): [{"activations": "tensor"}],
    (Role.QUANTIZER, "hqq"): [{"bits": bits, "group_size": 32} for bits in (2, 3, 8)] + [{"iterations": 0}],
    (Role.QUANTIZER, "nf4"): [{"double_quant": True}, {"block_size": 128}],
    (Role.QUANTIZER, "llm_int8"): [{"threshold": 0.0}, {"threshold": 1.0}, {"threshold": 1.0, "outliers": "columns"}],
    (Role.QUANTIZER, "fp8"): [
        {"weights": weights, "activations": activations}
        for weights in ("channel", "tensor")
        for activations in ("none", "token", "tensor")
    ]
    + [{"activations": "tensor", "observer": observer} for observer in ("percentile", "mse")],
    (Role.QUANTIZER, "bitsandbytes"): [
        {"method": "llm_int8"},
        {"method": "llm_int8", "threshold": 0.0},
        {"method": "fp4", "block_size": 128},
        {"double_quant": True},
        {"double_quant": True, "cpu_kernel": "plain"},
    ],
    (Role.QUANTIZER, "torchao"): [{"method": "int4"}, {"method": "int4", "group_size": 32}]
    + [{"method": method} for method in ("fp8", "fp8_dynamic")],
    (Role.QUANTIZER, "hqq_library"): [{"bits": bits, "group_size": 32} for bits in (2, 8)]
    + [{"bits": 3}, {"axis": 0}],
    (Role.TRANSFORM, "compile"): [{"backend": "eager"}, {"backend": "aot_eager"}],
    (Role.DECODER, "diffusion"): [
        {"block_length": 1},
        {"block_length": 5, "steps_per_block": 2, "remasking": "random"},
        {"block_length": 16, "threshold": 0.02},
    ],
    (Role.DECODER, "prompt_lookup"): [{"num_draft_tokens": 1}, {"min_match_tokens": 1}],
    (Role.DECODER, "jacobi"): [{"num_draft_tokens": 1}, {"num_draft_tokens": 15}],
    (Role.DECODER, "self_speculative"): [{"skip_layers": [0]}, {"skip_layers": [1], "adaptive": True}],
    (Role.DECODER, "speculative"): [{"draft": "target"}, {"draft": "target", "adaptive": True}],
    (Role.DECODER, "medusa"): [
        {"heads": "medusa"},
        {"heads": "medusa", "num_draft_tokens": 1},
        {"heads": "medusa", "num_draft_tokens": 63, "acceptance": "typical"},
    ],
    (Role.DECODER, "eagle"): [
        {"heads": "eagle"},
        {"heads": "eagle", "num_draft_tokens": 1, "depth": 1, "beam": 1},
        {"heads": "eagle", "num_draft_tokens": 63, "depth": 3, "beam": 2},
    ],
    (Role.SCHEDULER, "static"): [{"batch_size": 1}, {"batch_size": 3}],
    (Role.SCHEDULER, "continuous"): [
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 4, "chunked": True},
        {"max_num_batched_tokens": 16, "chunked": True},
        {"preemption": "swap"},
        {"preemption": "swap", "max_num_batched_tokens": 4, "chunked": True},
    ],
    (Role.SCHEDULER, "dynamic"): [{"batch_size": 3, "max_wait_s": 0.0}, {"batch_size": 3, "max_wait_s": 5.0}],
    (Role.SCHEDULER, "chunked_prefill"): [
        {"max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 16, "max_chunk_tokens": 3},
        {"preemption": "swap", "watermark": 0.2},
    ],
    (Role.SCHEDULER, "priority"): [
        {"ageing_s": 0.0},
        {"max_num_batched_tokens": 4, "chunked": True, "preemption": "swap"},
        {"watermark": 0.9},
    ],
    (Role.SCHEDULER, "shortest_first"): [
        {"length": "prompt", "ageing_s_per_token": 0.0},
        {"length": "output", "max_num_batched_tokens": 4, "chunked": True, "preemption": "swap"},
        {"length": "predicted", "max_num_batched_tokens": 16},
        {"length": "predicted", "max_num_batched_tokens": 4, "chunked": True, "preemption": "swap"},
    ],
    (Role.SCHEDULER, "fair_share"): [
        {"weights": {"a": 3.0}, "max_num_batched_tokens": 4},
        {"chunked": True, "max_num_batched_tokens": 4, "preemption": "swap"},
    ],
    (Role.SCHEDULER, "class_budgets"): [
        {"budgets": {"a": 1}, "default_budget": 2, "max_num_batched_tokens": 4},
        {"budgets": {"a": 7}, "preemption": "swap", "watermark": 0.1},
    ],
    (Role.SCHEDULER, "slo_aware"): [
        {"tpot_s": 1e-6},
        {"tpot_s": 0.0125, "ttft_s": 0.02, "max_num_batched_tokens": 20, "preemption": "swap"},
    ],
}


def _cases(role: Role) -> list[Any]:
    cases = []
    for registered in CATALOGUE.all(role):
        name = registered.component.name
        required = any(field.required for field in msgspec.structs.fields(registered.component.options))
        for given in [*([] if required else [{}]), *VARIANTS.get((role, name), [])]:
            label = ",".join(f"{key}={value}" for key, value in given.items())
            cases.append(pytest.param(registered, given, id=f"{name}[{label}]" if given else name))
    return cases


def _ready(registered: Registered, given: dict[str, Any], dtype: str | None = None) -> tuple[Component, Any]:
    component = registered.component
    if registered.unavailable:
        pytest.skip(registered.unavailable)
    options = msgspec.convert(given, component.options)
    reason = conformance.not_here(component, options, conformance.example_machine(), dtype)
    if reason:
        pytest.skip(reason)
    return component, options


def test_every_plugin_loads() -> None:
    assert CATALOGUE.errors == {}


@pytest.mark.parametrize(
    "registered",
    [pytest.param(each, id=f"{each.component.role}-{each.component.name}") for each in CATALOGUE.all()],
)
def test_component_is_documented_and_pure(registered: Registered) -> None:
    conformance.check_component(registered.component)


@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize(("registered", "given"), _cases(Role.ATTENTION))
def test_attention_equals_fp64(registered: Registered, given: dict[str, Any], share: int) -> None:
    component, options = _ready(registered, given)
    assert conformance.check_attention(component, options, share=(share, 4)) >= 8


@pytest.mark.parametrize(("registered", "given"), _cases(Role.KV))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kv_layout_gives_back_what_was_written(registered: Registered, given: dict[str, Any], seed: int) -> None:
    component, options = _ready(registered, given)
    conformance.check_kv_layout(component, options, seed=seed)


@pytest.mark.parametrize(("registered", "given"), _cases(Role.SCHEDULER))
def test_scheduler_serves_everyone(registered: Registered, given: dict[str, Any]) -> None:
    component, options = _ready(registered, given)
    conformance.check_scheduler(component, options)


@pytest.mark.usefixtures("beside_heads")
@pytest.mark.parametrize(("registered", "given"), _cases(Role.DECODER))
def test_decoder_emits_what_the_model_says(registered: Registered, given: dict[str, Any]) -> None:
    component, options = _ready(registered, given)
    conformance.check_decoder(component, options)


@pytest.mark.usefixtures("beside_heads")
@pytest.mark.full
@pytest.mark.parametrize(("registered", "given"), _cases(Role.DECODER))
def test_lossless_decoder_keeps_the_distribution(registered: Registered, given: dict[str, Any]) -> None:
    component, options = _ready(registered, given)
    if not component.lossless(options):
        pytest.skip("it does not say that it is lossless")
    conformance.check_distribution(component, options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("registered", "given"), _cases(Role.QUANTIZER))
def test_quantizer_keeps_its_word(registered: Registered, given: dict[str, Any], dtype: str) -> None:
    component, options = _ready(registered, given, dtype)
    conformance.check_quantizer(component, options, dtype=dtype)


@pytest.mark.parametrize(("registered", "given"), _cases(Role.TRANSFORM))
def test_transform_keeps_the_logits(registered: Registered, given: dict[str, Any]) -> None:
    component, options = _ready(registered, given)
    for family in conformance.TRANSFORM_FAMILIES:
        try:
            conformance.check_transform(component, options, family=family)
        except Unsupported as reason:
            pytest.skip(str(reason))
