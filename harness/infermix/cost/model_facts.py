"""Model facts from `config.json`, safetensors and GGUF headers. Opens no tensor, imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infermix.cost.architectures import (
    ARCHITECTURES,
    experts_per_token,
    missing_keys,
    model_tensors,
    normalised,
    num_experts,
)
from infermix.cost.config_probe import probe_config
from infermix.cost.gguf_config import MODEL_TYPES, NOT_PARAMETERS, gguf_config
from infermix.cost.gguf_header import read_gguf_header
from infermix.cost.layers import layers_of, probed_layers
from infermix.cost.safetensors_header import (
    SafetensorsHeader,
    checkpoint_files,
    is_complete,
    read_safetensors_header,
)
from infermix.cost.tensors import Inventory, TensorInfo, inventory
from infermix.errors import UserError, nearest
from infermix.roles.facts import DTYPE_BYTES, LayerFacts, ModelFacts, ResolvedSource
from infermix.roles.families import check_family, family_note, is_causal, is_stateful

#: Families that pass a `softcap` to attention when the config has one.
_SOFTCAPPED = frozenset({"gemma2", "vaultgemma"})
_UNTRACED = "attention shapes were read off the modules, not seen in a forward pass"
#: The default where neither the experiment nor the checkpoint names a dtype.
_DEFAULT_DTYPE = "float32"


@dataclass(frozen=True)
class _Described:
    """A model as far as its config and weights describe it."""

    config: Mapping[str, Any]
    architecture: str
    layers: tuple[LayerFacts, ...]
    weights: Inventory
    features: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def read_model_facts(source: ResolvedSource, *, dtype: str = "auto", dummy: bool = False) -> ModelFacts:
    """Facts of a resolved source. `dtype` "auto" is the checkpoint's own (float32 for a GGUF).

    Raises `UserError` for a config that no family explains, an unknown dtype, or a broken weights file.
    """
    if source.kind == "gguf":
        return _gguf_facts(source, dtype)
    config = source.config
    refusal = _refusal(config)
    header = _header(source)
    described = _describe(source, config, header.tensors if header else (), refusal)
    if header is not None:
        described = _checked(described, header.tensors)
    is_dummy = dummy or source.kind == "dummy"
    return _facts(source, described, dtype, refusal, _weights_digest(source, header), is_dummy)


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """The dtype a `config.json` names, float32 where it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or _text(config).get("dtype") or _DEFAULT_DTYPE
    return str(name).removeprefix("torch.")


def _header(source: ResolvedSource) -> SafetensorsHeader | None:
    """Headers of the weights; `None` for dummies and for hub models that are not downloaded yet."""
    if source.kind == "dummy" or (source.repo_id is not None and not is_complete(source.directory)):
        return None
    return read_safetensors_header(checkpoint_files(source.directory))


def _weights_digest(source: ResolvedSource, header: SafetensorsHeader | None) -> str:
    if source.repo_id is not None:  # the snapshot's folder is its commit: known before the weights are here
        return f"{source.repo_id}@{source.directory.name}"
    return header.digest if header else ""


def _gguf_facts(source: ResolvedSource, dtype: str) -> ModelFacts:
    assert source.file is not None
    header = read_gguf_header(source.file)
    config = gguf_config(header)
    tensors = [tensor for tensor in header.tensors if tensor.name not in NOT_PARAMETERS]
    if header.architecture in MODEL_TYPES:
        refusal = _refusal(config)
        described = _checked(_describe(source, config, tensors, refusal), tensors)
    else:
        refusal = f"GGUF files of architecture {header.architecture!r} are not read"
        described = _bare(config, tensors)
    return _facts(source, described, _DEFAULT_DTYPE if dtype == "auto" else dtype, refusal, header.digest, False)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config inside a wrapping one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _refusal(config: Mapping[str, Any]) -> str | None:
    text = _text(config)
    reason = check_family(str(config.get("model_type", "")), config, with_states=True)
    if reason is None and text is not config:
        reason = check_family(str(text.get("model_type", config.get("model_type", ""))), text, with_states=True)
    return reason


def _describe(
    source: ResolvedSource, config: Mapping[str, Any], tensors: Iterable[TensorInfo], refusal: str | None
) -> _Described:
    model_type = config.get("model_type")
    if not model_type:
        raise UserError("config has no model_type", where=source.label)
    if model_type in ARCHITECTURES and not missing_keys(config):
        return _from_config(config, source)
    try:
        return _from_probe(config, source)
    except UserError:
        if refusal is None:
            raise
        return _bare(config, tensors)


def _from_config(config: Mapping[str, Any], source: ResolvedSource) -> _Described:
    full = normalised(config)
    try:
        weights = inventory(
            model_tensors(full), experts_per_token=experts_per_token(full), num_experts=num_experts(full)
        )
        layers = layers_of(full)
    except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
        raise UserError(
            f"config does not describe a {full['model_type']} model: {error}", where=source.label
        ) from None
    return _Described(full, _architecture(full), layers, weights, _features(full, layers, ()))


def _from_probe(config: Mapping[str, Any], source: ResolvedSource) -> _Described:
    probe = probe_config(
        config,
        where=source.label,
        directory=str(source.directory),
        trust_remote_code=source.trust_remote_code,
    )
    full = normalised({**probe.config, "model_type": probe.config.get("model_type", config["model_type"])})
    known = full["model_type"] in ARCHITECTURES
    layers = layers_of(full) if known else probed_layers(full, probe.attention, probe.states)
    weights = inventory(
        probe.tensors,
        experts_per_token=experts_per_token(full),
        num_experts=num_experts(full),
        transposed=full["model_type"] == "gpt2",
    )
    notes = () if known or probe.traced or not any(layer.kind == "attention" for layer in layers) else (_UNTRACED,)
    return _Described(full, probe.architecture, layers, weights, _features(full, layers, probe.attention), notes)


def _bare(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> _Described:
    """What can be said of a refused model that transformers does not build as a decoder."""
    full = normalised(_text(config))
    note = "only the sizes of the weights are known"
    return _Described(full, _architecture(config), (), inventory(tensors), notes=(note,))


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if names else str(config["model_type"])


def _features(
    config: Mapping[str, Any], layers: tuple[LayerFacts, ...], modules: tuple[Mapping[str, Any], ...]
) -> frozenset[str]:
    features = set()
    if any(layer.window is not None for layer in layers):
        features.add("attn:sliding_window")
    softcap = config["model_type"] in _SOFTCAPPED and config.get("attn_logit_softcapping")
    if softcap or any(module["softcap"] for module in modules):
        features.add("attn:softcap")
    if config["model_type"] == "gpt_oss" or any(module["sinks"] for module in modules):
        features.add("attn:sinks")
    attending = [layer for layer in layers if layer.kind == "attention"]
    if attending and all(layer.latent_dim for layer in attending):
        features.add("model:latent")
    if is_stateful(config):
        features |= {"model:state", "kv:state"}
    if not is_causal(config):
        features |= _bidirectional_features(config)
    packed = config.get("quantization_config")
    if isinstance(packed, Mapping):
        features.add(f"weights:{packed.get('quant_method', 'unnamed')}")
    return frozenset(features)


def _bidirectional_features(config: Mapping[str, Any]) -> set[str]:
    """Keys of a token change with those behind it, and there is no next token: masks are filled in."""
    features = {"attn:noncausal", "kv:recompute", "decoder:unmasks", "model:bidirectional"}
    if config.get("mask_token_id") is not None:
        features.add("model:mask_token")
    return features | ({"model:shifted_predictions"} if config.get("shifted_predictions") else set())


def _checked(described: _Described, tensors: Iterable[TensorInfo]) -> _Described:
    """Compare with the file: where it lists other values (buffers, extra heads), a note says so."""
    listed = sum(t.num_elements for t in tensors if not (described.weights.tied and t.name == "lm_head.weight"))
    expected = described.weights.num_parameters
    if described.config.get("quantization_config"):
        note = "the checkpoint is quantized; sizes are those of the unquantized model"
    elif listed != expected:
        note = f"the file lists {listed:,} values, the model has {expected:,} parameters"
    else:
        return described
    return replace(described, notes=(*described.notes, note))


def _facts(
    source: ResolvedSource,
    described: _Described,
    dtype: str,
    refusal: str | None,
    weights_digest: str,
    dummy: bool,
) -> ModelFacts:
    config = described.config
    chosen = checkpoint_dtype(source.config) if dtype == "auto" else dtype
    if chosen not in DTYPE_BYTES:
        raise UserError(f"unknown dtype {chosen!r}", where=source.label, hint=nearest(chosen, DTYPE_BYTES))
    notes = [*described.notes, *_notes(config, refusal)]
    return ModelFacts(
        source=source.label,
        model_type=str(config["model_type"]),
        architecture=described.architecture,
        dtype=chosen,
        vocab_size=int(config.get("vocab_size") or 0),
        hidden_size=int(config.get("hidden_size") or 0),
        max_position_embeddings=_positions(config),
        layers=described.layers,
        matrices=described.weights.matrices,
        other_parameters=described.weights.other_parameters,
        tied_embeddings=described.weights.tied,
        dummy_weights=dummy,
        features=described.features | ({"model:gguf"} if source.kind == "gguf" else frozenset()),
        refusal=refusal,
        digest=_digest(source.config or config, weights_digest, dummy),
        notes=tuple(notes),
        mask_token_id=config.get("mask_token_id"),
    )


def _notes(config: Mapping[str, Any], refusal: str | None) -> Iterator[str]:
    model_type = str(config["model_type"])
    if config.get("published_as"):
        yield f"{config['published_as']} is run as {model_type} that attends in both directions, not by its own code"
    note = None if refusal else family_note(model_type)
    if note:
        yield note


def _positions(config: Mapping[str, Any]) -> int:
    """The longest sequence that the config allows; models without a limit get 2**20."""
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    return 1 << 20


def _digest(config: Mapping[str, Any], weights_digest: str, dummy: bool) -> str:
    # bookkeeping that does not change the model
    ignored = {"_name_or_path", "transformers_version", "_source"}
    content = {key: value for key, value in config.items() if key not in ignored}
    text = json.dumps([content, weights_digest, dummy], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
