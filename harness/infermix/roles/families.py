"""Which model families the native engine drives, and why the others are refused. Plain data, no torch.

The joint (`engine.bridge`) runs transformers' own modeling code with one attention function of ours. Families
differ in whether they hand everything to that function: those in `DRIVEN` were compared, logits against the
eager full forward; those in `REFUSED` are known to give wrong answers without any error. Families in neither
set are decided by the self-check at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: `model_type` values (sub-config names where a family has one) that the joint drives without model code.
DRIVEN = frozenset(
    _words("""
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm
    deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma
    gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode
    gpt_neox gpt_oss gptj
    granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama mellum mimo_v2_flash minicpm3
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe
    sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
    """)
)

_OWN_ATTENTION = "its attention does not go through transformers' attention interface, so sequences would mix"
_SHARED_INDEX = "it calls attention twice for one layer index, so keys and values would be overwritten"
_NO_INDEX = "its shared attention blocks have no layer index of their own, so keys would be overwritten"
_DROPS_KEYWORDS = "it does not forward keyword arguments to its attention, so the batch never arrives there"
_READS_MASK = "its sparse attention reads the mask, which the packed batch does not build"
_RECURRENT = "its recurrent layers keep their states outside the cache objects that the state layout reads"
#: Families with recurrent layers, compared in the same way over a layout that keeps their states (`kv:state`).
STATEFUL = frozenset(
    _words("""
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 nemotron_h
    olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next rwkv
    """)
)

_NEEDS_STATE = "it has recurrent layers; the KV layout must keep their states (kv: state)"
_ENCODER = "it is an encoder or encoder-decoder; the native engine drives decoders"

#: `model_type` -> why the native engine must not run it.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("bloom", "mpt", "falcon", "xglm", "openai-gpt", "gpt_neo"), _OWN_ATTENTION),
    **dict.fromkeys(("diffllama", "dory", "hrm_text"), _SHARED_INDEX),
    **dict.fromkeys(("zamba", "zamba2"), _NO_INDEX),
    **dict.fromkeys(("stablelm", "nemotron"), _DROPS_KEYWORDS),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _READS_MASK),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "its chunked attention exists only in the mask, which the packed batch does not build",
    ),
    "doge": "it adds a bias of its own to the attention mask, which the packed batch does not build",
    "deepseek_v4": "it compresses its keys, which needs a layout of its own",
    **dict.fromkeys(
        _words("""
        minimax qwen3_5 qwen3_5_moe recurrent_gemma xlstm
        """),
        _RECURRENT,
    ),
    **dict.fromkeys(
        _words("""
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert
        data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta
        roberta-prelayernorm roc_bert roformer t5 trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod
        """),
        _ENCODER,
    ),
}

#: Layer types whose whole meaning reaches the attention function; others live in a mask or a state.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "gated_delta_net"})

#: Rope types whose frequencies depend on the longest sequence of the batch.
_ORIGINAL = "original_max_position_embeddings"
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

#: Driven families whose window, where a config sets one, is applied by the mask alone.
_WINDOW_ONLY_IN_MASK = frozenset({"phimoe", "qwen2_moe"})

_WINDOW_KEYS = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "local_attention",
    "attention_window",
)


def is_stateful(config: Mapping[str, Any]) -> bool:
    """Whether the model runs only over a layout that keeps recurrent states."""
    return config.get("model_type") in STATEFUL


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether tokens see nothing behind them; for transformers, `is_causal: false` means attention both ways."""
    return config.get("is_causal") is not False


def check_family(model_type: str, config: Mapping[str, Any], *, with_states: bool = False) -> str | None:
    """Why the native engine must not run this model, or `None`; `with_states` over a layout that keeps states.

    `config` is the text model's `config.json` content. An unknown `model_type` is not refused for being
    unknown (see `family_note`), only for features that the self-check's short sequences would not show.
    """
    if model_type in REFUSED:
        return f"{model_type}: {REFUSED[model_type]}"
    if model_type in STATEFUL and not with_states:
        return f"{model_type}: {_NEEDS_STATE}"
    reason = _layer_type_reason(model_type, config) or _direction_reason(config) or _rope_reason(config)
    if reason is None and model_type in _WINDOW_ONLY_IN_MASK and expects_window(config):
        reason = "its sliding window exists only in the mask, which the packed batch does not build"
    if reason is None and model_type not in DRIVEN | STATEFUL:
        reason = _unknown_family_reason(config)
    return f"{model_type}: {reason}" if reason else None


def family_note(model_type: str) -> str | None:
    """A sentence for models that only the load-time self-check can admit; `None` for tested families."""
    if model_type in DRIVEN | STATEFUL or model_type in REFUSED:
        return None
    return f"{model_type} is not among the tested families: the self-check at load decides whether it runs"


def expects_window(config: Mapping[str, Any]) -> bool:
    """Whether the config asks for a sliding window that can matter within the model's positions."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return False
    kinds = config.get("layer_types")
    if kinds and "sliding_attention" not in kinds:
        return False
    longest = config.get("max_position_embeddings")
    return not (isinstance(window, int) and isinstance(longest, int) and window >= longest)


def _layer_type_reason(model_type: str, config: Mapping[str, Any]) -> str | None:
    if model_type in STATEFUL:
        return None
    kinds = set(config.get("layer_types") or ())
    if kinds & _RECURRENT_LAYER_TYPES:
        return _RECURRENT
    strange = sorted(map(str, kinds - LAYER_TYPES))
    return f"layer types {', '.join(strange)} are not driven by the native engine" if strange else None


def _direction_reason(config: Mapping[str, Any]) -> str | None:
    if config.get("use_bidirectional_attention"):
        return "it attends in both directions; the native engine drives causal decoders"
    if not is_causal(config) and expects_window(config):
        return "its sliding window reaches in both directions, which no attention part knows about"
    if not is_causal(config) and is_stateful(config):
        return "its recurrent layers run in one direction, although the config says is_causal: false"
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        return _ENCODER
    return None


def _rope_reason(config: Mapping[str, Any]) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in per_layer_type or [rope]:
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind not in _BATCH_DEPENDENT_ROPE:
            continue
        longest = config.get("max_position_embeddings")
        original = parameters.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        if not (longest and original and longest <= original):
            return (
                f"its {kind} rope changes with the longest sequence of a batch, so one sequence would alter "
                f"another; set max_position_embeddings to {_ORIGINAL} under model.config"
            )
    return None


def _unknown_family_reason(config: Mapping[str, Any]) -> str | None:
    if isinstance(config.get("text_config"), Mapping):
        return "it wraps a text model; the native engine drives the text model's own checkpoint"
    present = [key for key in _WINDOW_KEYS if config.get(key)]
    return f"not a tested family, and its {present[0]} may live only in the mask" if present else None
