"""Facts of the families: parameters, layers, windows, features, against transformers' own modules."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from infermix.cost.architectures import ARCHITECTURES, missing_keys
from infermix.cost.config_probe import probe_config
from infermix.cost.kv import kv_groups, latent_groups, layer_states, state_bytes_per_seq
from infermix.cost.layers import probed_layers
from infermix.cost.model_facts import read_model_facts
from infermix.cost.tensors import matrix_kind
from infermix.errors import UserError
from infermix.roles.facts import ModelFacts, ResolvedSource, StateTensor

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
WINDOW = {"sliding_window": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    **MOE,
}
PERIOD = {"sliding_window_pattern": 3}

#: One or more configs per family whose shape is computed without transformers.
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "mistral", **WINDOW},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4, **WINDOW},
    {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2, **WINDOW},
    {"model_type": "gemma"},
    {"model_type": "gemma2", "attn_logit_softcapping": 50.0, **WINDOW},
    {"model_type": "gemma2", "attn_logit_softcapping": None, **WINDOW},
    {"model_type": "gemma3_text", **WINDOW, **PERIOD},
    {"model_type": "gemma3_text", **WINDOW},
    {"model_type": "phi3", "pad_token_id": 0},
    {"model_type": "phi3", "pad_token_id": 0, **WINDOW},
    {"model_type": "olmo2"},
    {"model_type": "olmo3", **WINDOW},
    {"model_type": "smollm3", "pad_token_id": 0, "use_sliding_window": True, **WINDOW},
    {"model_type": "starcoder2", "use_bias": True, **WINDOW},
    {"model_type": "starcoder2", "use_bias": False, "tie_word_embeddings": False},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "n_inner": None},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 56,
        "decoder_sparse_step": 2,
        **MOE,
    },
    {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1], **MOE},
    {"model_type": "qwen3_moe", "num_experts": 4, "use_sliding_window": True, **WINDOW, **MOE},
    {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, **WINDOW},
    {"model_type": "deepseek_v3", **LATENT},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None},
    {"model_type": "deepseek_v2", **LATENT},
]
#: Config values that transformers' classes must not see.
_FOREIGN = {"gpt2": set(SMALL) - {"vocab_size"}, "deepseek_v3": {"head_dim"}, "deepseek_v2": {"head_dim"}}


def full_config(family: dict[str, Any]) -> dict[str, Any]:
    """The small config under the family's own values."""
    hidden = _FOREIGN.get(family["model_type"], set())
    return {**{key: value for key, value in SMALL.items() if key not in hidden}, **family}


def facts_of(config: dict[str, Any], dtype: str = "auto") -> ModelFacts:
    return read_model_facts(ResolvedSource("test", "dummy", Path(), None, config), dtype=dtype)


def _label(family: dict[str, Any]) -> str:
    return "-".join([family["model_type"], *(key for key in family if key not in ("model_type", *LATENT, *MOE))])


@pytest.fixture(scope="session")
def probed() -> list[dict[str, Any]]:
    """What transformers makes of every config, in one child process."""
    code = (
        "import json, sys\n"
        "from infermix.cost.config_probe_child import probe\n"
        "ask = lambda c: probe({'config': c, 'directory': None, 'trust_remote_code': False})\n"
        "print(json.dumps([ask(config) for config in json.load(sys.stdin)]))\n"
    )
    configs = json.dumps([full_config(family) for family in FAMILIES])
    done = subprocess.run([sys.executable, "-c", code], input=configs, capture_output=True, text=True, check=True)
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("index", range(len(FAMILIES)), ids=[_label(family) for family in FAMILIES])
def test_shape_is_that_of_transformers_modules(index: int, probed: list[dict[str, Any]]) -> None:
    config, truth = full_config(FAMILIES[index]), probed[index]
    assert missing_keys(config) == []
    facts = facts_of(config)
    assert truth["traced"]
    total = 0
    for _, shape in truth["tensors"]:
        count = 1
        for size in shape:
            count *= size
        total += count
    assert facts.num_parameters == total
    # experts are not seen by attention: taken from our side
    traced = probed_layers({**truth["config"], "num_experts": 0}, tuple(truth["attention"]))
    plain = tuple(replace(layer, num_experts=0, num_experts_per_token=0) for layer in facts.layers)
    assert plain == tuple(replace(layer, num_experts=0, num_experts_per_token=0) for layer in traced)
    assert ("attn:softcap" in facts.features) == any(call["softcap"] for call in truth["attention"])
    assert ("attn:sinks" in facts.features) == any(call["sinks"] for call in truth["attention"])
    assert ("attn:sliding_window" in facts.features) == any(call["window"] for call in truth["attention"])


def test_every_known_family_is_compared() -> None:
    assert {family["model_type"] for family in FAMILIES} == set(ARCHITECTURES)


def test_windows_make_groups() -> None:
    facts = facts_of(full_config({"model_type": "gemma3_text", **WINDOW}))
    first, second = kv_groups(facts)
    assert (first.layers, first.window) == ((0, 1, 2, 3, 4), 8)
    assert (second.layers, second.window) == ((5,), None)
    plain = facts_of(full_config({"model_type": "llama"}))
    (group,) = kv_groups(plain)
    assert group.layers == tuple(range(6))
    assert group.bytes_per_token(2) == 6 * 2 * (16 + 16) * 2


def test_latent_attention_is_counted_expanded() -> None:
    (group,) = kv_groups(facts_of(full_config({"model_type": "deepseek_v3", **LATENT})))
    assert (group.num_kv_heads, group.key_dim, group.value_dim) == (6, 20, 10)


def test_experts_per_layer() -> None:
    facts = facts_of(full_config({"model_type": "deepseek_v3", **LATENT}))
    assert [layer.num_experts for layer in facts.layers] == [0, 0, 4, 4, 4, 4]
    experts = [matrix for matrix in facts.matrices if matrix.kind == "expert"]
    assert {(matrix.experts, matrix.experts_per_token) for matrix in experts} == {(4, 2)}
    assert sum(matrix.parameters for matrix in experts) == 4 * 4 * 3 * 40 * 48


def test_defaults_of_the_class_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2's config class knows window and softcap; this config names neither."""
    config = {"model_type": "gemma2", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 6}
    assert "sliding_window" in missing_keys(config)
    facts = facts_of(config)
    assert [layer.window for layer in facts.layers] == [4096, None]
    assert (facts.layers[0].num_kv_heads, facts.layers[0].key_dim) == (4, 256)
    assert facts.features == {"attn:sliding_window", "attn:softcap"}
    monkeypatch.setattr(subprocess, "run", None)  # a second question would fail
    assert facts_of(config) == facts


def test_a_family_without_rules_is_traced() -> None:
    config = {**SMALL, "model_type": "cohere2", "sliding_window": 8, "head_dim": 8, "hidden_size": 48}
    facts = facts_of(config)
    assert [layer.window for layer in facts.layers] == [8, 8, 8, None, 8, 8]
    assert facts.architecture == "Cohere2ForCausalLM"
    assert facts.tied_embeddings
    assert facts.refusal is None


def test_refused_families_say_why() -> None:
    facts = facts_of({**SMALL, "model_type": "bloom"})
    assert facts.refusal is not None
    assert facts.refusal.startswith("bloom")


def test_recurrent_layers_tell_what_they_keep() -> None:
    """Mamba, 2 x 32 channels: the last 4 inputs of the convolution and 16 states of each, per sequence."""
    facts = facts_of({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 32})
    assert facts.refusal is None
    assert facts.features == {"model:state", "kv:state"}
    assert [layer.kind for layer in facts.layers] == ["recurrent", "recurrent"]
    assert kv_groups(facts) == ()
    for layer in facts.layers:
        conv, recurrent = layer.states
        assert (conv, recurrent.shape) == (StateTensor("conv0", (64, 4)), (64, 16))
    assert state_bytes_per_seq(facts) == 2 * 64 * (4 + 16) * 4


def test_hybrids_have_groups_and_states() -> None:
    kinds = ["linear_attention", "full_attention"] * 3
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {**SMALL, **linear, **experts, "model_type": "qwen3_next", "layer_types": kinds, "head_dim": 16}
    facts = facts_of({**config, "shared_expert_intermediate_size": 32})
    assert [bool(layer.states) for layer in facts.layers] == [True, False] * 3
    (group,) = kv_groups(facts)
    assert group.layers == (1, 3, 5)
    conv, recurrent = layer_states(facts)[0].tensors
    # queries and keys of 2 heads of 8, values of 4 heads of 16; one 8 x 16 matrix per value head
    assert (conv.shape, recurrent.shape) == ((2 * 2 * 8 + 4 * 16, 3), (4, 8, 16))
    assert state_bytes_per_seq(facts) == 3 * (96 * 3 + 4 * 8 * 16) * 4


def test_latents_stand_beside_the_expanded_groups() -> None:
    facts = facts_of(full_config({"model_type": "deepseek_v3", **LATENT}))
    (group,) = latent_groups(facts)
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert (group.num_kv_heads, group.key_dim, group.value_dim) == (1, width, LATENT["kv_lora_rank"])
    assert group.bytes_per_token(2) == 6 * width * 2
    assert "model:latent" in facts.features
    assert latent_groups(facts_of(full_config({"model_type": "llama"}))) == ()


def test_a_config_that_nobody_builds() -> None:
    with pytest.raises(UserError, match="knows no model_type 'zebra'"):
        facts_of({"model_type": "zebra", "hidden_size": 8})
    with pytest.raises(UserError, match="does not describe a llama"):
        facts_of({**SMALL, "model_type": "llama", "hidden_size": "wide"})


def test_dtype() -> None:
    config = full_config({"model_type": "llama"})
    assert facts_of(config).dtype == "float32"
    assert facts_of({**config, "torch_dtype": "torch.float16"}).dtype == "float16"
    facts = facts_of({**config, "dtype": "bfloat16"})
    assert facts.weight_bytes == 2 * facts.num_parameters
    with pytest.raises(UserError, match="unknown dtype 'bf16'") as caught:
        facts_of(config, dtype="bf16")
    assert "bfloat16" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
        ("output.weight", "lm_head"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("blk.3.attn_output.weight", "attention"),
        ("transformer.h.0.attn.c_attn.weight", "attention"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.block_sparse_moe.gate.weight", "router"),
        ("blk.0.ffn_gate_inp.weight", "router"),
        ("blk.0.ffn_gate_exps.weight", "expert"),
        ("blk.0.ffn_gate.weight", "mlp"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "expert"),
        ("model.layers.0.mlp.experts.gate_up_proj", "expert"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "shared_expert"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "router"),
        ("blk.0.ffn_up_shexp.weight", "shared_expert"),
    ],
)
def test_matrix_kind(name: str, kind: str) -> None:
    assert matrix_kind(name) == kind


def test_no_torch_for_known_families() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from infermix.cost import estimate, machine, memory, model_facts, source\n"
        "from infermix.spec.experiment import ModelSource\n"
        "found = source.locate_model(ModelSource(source='shape:llama-3-8b'), Path())\n"
        "model_facts.read_model_facts(found)\n"
        "machine.machine_facts('auto')\n"
        "heavy = {'torch', 'transformers', 'triton', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(sorted(heavy)) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_default_config_of_every_known_family() -> None:
    """The classes' own defaults, full size, on the meta device."""
    for family in ARCHITECTURES:
        probe = probe_config({"model_type": family}, where=family, directory="", trust_remote_code=False)
        total = sum(tensor.num_elements for tensor in probe.tensors)
        assert facts_of(dict(probe.config)).num_parameters == total, family
