"""Wrote `model/`: one random decoder layer, a word for every id, and a text that the model itself drew.

On its own text the model is sure of itself, so that a wrong rotary base and damaged weights show in the perplexity.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "model"
VOCAB, TOKENS, POSITIONS = 96, 2600, 256
WORDS = ("<unk>", "<s>", "</s>", *(f"w{token}" for token in range(3, VOCAB)))


def make() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=POSITIONS, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.weight.mul_(1.5)
        _spread(layer.input_layernorm, layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        _spread(layer.post_attention_layernorm, layer.mlp.gate_proj, layer.mlp.up_proj)
    model.half().save_pretrained(FOLDER)
    text = " ".join(WORDS[token] for token in _speak(model.float()))
    (FOLDER / "corpus.txt").write_text(text + "\n", encoding="utf-8")
    _tokenizer().save_pretrained(FOLDER)


def _spread(norm: torch.nn.Module, *linears: torch.nn.Linear) -> None:
    """Channels of very different size, as in real models, and the same function."""
    scale = torch.randn(norm.weight.shape[0]).mul(0.3).exp()
    norm.weight.mul_(scale)
    for linear in linears:
        linear.weight.div_(scale)


def _speak(model: LlamaForCausalLM) -> list[int]:
    """Drawn from the model, at a low temperature, in windows of half its positions."""
    draw, tokens = torch.Generator().manual_seed(1), [3]
    with torch.inference_mode():
        while len(tokens) < TOKENS:
            ids = torch.tensor([tokens[-(POSITIONS // 2) :]])
            chances = model(input_ids=ids).logits[0, -1].mul(2.5).softmax(-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=draw)))
    return tokens


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


if __name__ == "__main__":
    make()
