"""LLaDA in plain PyTorch, with the names of its published checkpoints, and its decoding as the paper has it.

Nothing of transformers or of the engine is used, so that both can be compared with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MASK = 95
#: As published, in small; eos_token_id ends a text.
CONFIG = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "activation_type": "silu", "alibi": False,
    "attention_layer_norm": False, "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"},
    "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 64, "embedding_size": 96,
    "eos_token_id": 5, "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False,
    "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": MASK, "max_sequence_length": 256,
    "mlp_hidden_size": 128, "mlp_ratio": 4, "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 2,
    "n_layers": 2, "pad_token_id": 5, "rms_norm_eps": 1e-05, "rope": True, "rope_full_precision": True,
    "rope_theta": 500000.0, "scale_logits": False, "torch_dtype": "float32", "use_cache": False, "vocab_size": 96,
    "weight_tying": False,
}  # fmt: skip
Logits = Callable[[Sequence[int]], Tensor]


def write_llada(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint in the published layout."""
    config = {**CONFIG, **changes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_draw(config, seed), directory / "model.safetensors")
    return directory


def _draw(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    width, inner, rows = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    keys = width // config["n_heads"] * config["n_kv_heads"]
    tensors = {
        "wte.weight": normal(rows, width),
        "ff_out.weight": normal(rows, width),
        "ln_f.weight": 1 + normal(width),
    }
    for layer in range(config["n_layers"]):
        shapes = {
            "q_proj": (width, width), "k_proj": (keys, width), "v_proj": (keys, width), "attn_out": (width, width),
            "ff_proj": (inner, width), "up_proj": (inner, width), "ff_out": (width, inner),
        }  # fmt: skip
        tensors |= {f"blocks.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        tensors |= {f"blocks.{layer}.{name}.weight": 1 + normal(width) for name in ("attn_norm", "ff_norm")}
    return {f"model.transformer.{name}": tensor for name, tensor in tensors.items()}


class PlainLLaDA:
    """Logits `[T, V]` of one text, every token of which sees every other."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        self.weights = {name.removeprefix("model.transformer."): each for name, each in tensors.items()}

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        x = self.weights["wte.weight"][torch.tensor(token_ids)]
        for layer in range(self.config["n_layers"]):
            own = {
                name.removeprefix(f"blocks.{layer}."): each
                for name, each in self.weights.items()
                if name.startswith(f"blocks.{layer}.")
            }
            x = x + self._attention(self._norm(x, own["attn_norm.weight"]), own)
            normed = self._norm(x, own["ff_norm.weight"])
            gate, up = normed @ own["ff_proj.weight"].T, normed @ own["up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ own["ff_out.weight"].T
        return self._norm(x, self.weights["ln_f.weight"]) @ self.weights["ff_out.weight"].T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()

    def _attention(self, x: Tensor, own: dict[str, Tensor]) -> Tensor:
        heads, kv_heads = self.config["n_heads"], self.config["n_kv_heads"]
        q = self._rotate((x @ own["q_proj.weight"].T).unflatten(1, (heads, -1)))
        k = self._rotate((x @ own["k_proj.weight"].T).unflatten(1, (kv_heads, -1)))
        v = (x @ own["v_proj.weight"].T).unflatten(1, (kv_heads, -1))
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return mixed.flatten(1) @ own["attn_out.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (torch.arange(len(x))[:, None] * frequencies)[:, None]
        first, second = x[..., :half], x[..., half:]
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat(turned, -1)


def decode(
    logits_of: Logits,
    prompt: Sequence[int],
    length: int,
    *,
    block_length: int,
    steps: int | None = None,
    threshold: float | None = None,
    choose: Callable[[Tensor, int, int], int] | None = None,
    confidence: Callable[[int, int], float] | None = None,
    mask: int = MASK,
) -> list[int]:
    """Greedy low-confidence remasking of a canvas of `length` masks.

    `choose(logits [V], position, step)` and `confidence(position, step)` stand in for both. The block is done in
    `steps` even shares, or by `threshold`.
    """
    text = [*prompt, *[mask] * length]
    for start in range(len(prompt), len(text), block_length):
        stop = min(start + block_length, len(text))
        shares = _shares(stop - start, steps or stop - start)
        step = 0
        while mask in text[start:stop]:
            found = []
            logits = logits_of(text)
            for position in range(start, stop):
                if text[position] != mask:
                    continue
                row = logits[position].double().clone()
                row[mask] = float("-inf")
                token = int(row.argmax()) if choose is None else choose(row, position, step)
                sure = float(row.softmax(-1)[token]) if confidence is None else confidence(position, step)
                found.append((sure, position, token))
            found.sort(key=lambda each: (-each[0], each[1]))
            sure_ones = 0 if threshold is None else sum(each[0] >= threshold for each in found)
            count = shares[step] if threshold is None else max(1, sure_ones)
            for _, position, token in found[:count]:
                text[position] = token
            step += 1
    return text[len(prompt) :]


def _shares(total: int, steps: int) -> list[int]:
    """`total` in so many parts, the larger ones first, those of nothing left out."""
    return [share for step in range(steps) if (share := total // steps + (step < total % steps))]
