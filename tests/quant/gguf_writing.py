"""A tiny Llama as a GGUF file, with every linear in blocks of a wanted kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 256, 512, 2, 4, 2, 260
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
}  # fmt: skip
#: Where the fp16 scales of blocks lie that the package gguf reads and cannot write, in bytes.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind: str, shape: tuple[int, int], draw: np.random.Generator) -> np.ndarray:
    """uint8 `[rows, bytes]`: rounded normal weights, or random bytes with small scales for what is only read."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALES:
        return gguf.quants.quantize(draw.normal(0, 0.05, shape).astype(np.float32), number)
    weights, size = gguf.GGML_QUANT_SIZES[number]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // weights, size), dtype=np.uint8)
    for place in _SCALES[kind]:
        scale = draw.uniform(1e-4, 2e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_llama(path: Path, kinds: Mapping[str, str], default: str, seed: int = 0) -> Path:
    """`kinds`: tensor name without `blk.N.` -> kind. The head is tied, the embedding fp32."""
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer)
    writer.add_tensor("token_embd.weight", draw.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        for name, shape in SHAPES.items():
            kind = kinds.get(name, default)
            dtype: Any = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"blk.{layer}.{name}.weight", random_blocks(kind, shape, draw), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(f"<t{index}>" for index in range(VOCAB - 3)), "a", "b", "ab"])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
