"""Inputs of EAGLE's layer are even while it learns; what is written reads them as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from infermix.roles.training import HeadTraining, OwnOutput
from infermix_decoders.eagle_layer import EagleDraft, EagleShape, causal
from infermix_decoders.train_eagle import EvenInputs, even_inputs
from infermix_decoders.train_loop import Teacher
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH = 32
SHAPE = EagleShape(WIDTH, 64, 4, 2, 8, rope_theta=10000.0, eps=1e-6, bias=True)


def training_of(samples: tuple[OwnOutput, ...]) -> HeadTraining:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.01,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return HeadTraining(
        model=model, samples=samples, held_out=(), batch_tokens=64, learning_rate=1e-3, seed=0, output=Path("unused"),
        about={}, share_done=lambda step: 1.0,
    )  # fmt: skip


def test_a_folded_layer_reads_raw_inputs() -> None:
    torch.manual_seed(1)
    draft, even = EagleDraft(SHAPE).double(), EvenInputs(features=7.5, embeddings=0.03)
    features, embeddings = 7.5 * torch.randn(2, 5, WIDTH).double(), 0.03 * torch.randn(2, 5, WIDTH).double()
    positions = torch.arange(5).expand(2, -1)
    wanted = draft(features / even.features, embeddings / even.embeddings, positions, causal)
    raw = draft(features, embeddings, positions, causal)
    even.fold_into(draft.fc)
    found = draft(features, embeddings, positions, causal)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)  # 64 bits; angles are in 32
    assert not torch.allclose(raw, wanted)


def test_sizes_are_those_of_what_the_model_said() -> None:
    training = training_of((OwnOutput((1, 2, 3, 4, 5, 6), 3), OwnOutput((7, 8, 9), 1)))
    teacher, embed = Teacher(training.model), training.model.get_input_embeddings()
    even = even_inputs(teacher, embed, training)
    with torch.no_grad():
        said = torch.cat([embed.weight[[3, 4, 5]], embed.weight[[7, 8]]])
    assert abs(even.embeddings - float(said.std())) < 1e-6
    assert even.features > 10 * even.embeddings  # behind the last norm, hidden states are about 1


def test_nothing_to_measure_leaves_inputs_alone() -> None:
    training = training_of((OwnOutput((1, 2), 2),))
    even = even_inputs(Teacher(training.model), training.model.get_input_embeddings(), training)
    assert even == EvenInputs(1.0, 1.0)
