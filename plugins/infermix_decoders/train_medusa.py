"""Medusa heads by self-distillation: head k learns the model's own distribution k places further on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from infermix.roles.training import HeadTraining
from torch import Tensor

from infermix_decoders.build_medusa import NUM_RANKS
from infermix_decoders.head_files import MEDUSA_FILES, write_heads
from infermix_decoders.medusa_heads import MedusaHeads
from infermix_decoders.train_loop import Seen, Teacher, as_batch, random_of, train

if TYPE_CHECKING:
    from infermix_decoders.tree_options import MedusaTraining


#: Of the learning rate, for the large matrices: they begin as the model's own, which knows words that the texts lack.
_OUTPUT_SHARE = 0.3


def train_medusa(options: MedusaTraining, training: HeadTraining) -> dict[str, Any]:
    """Frozen base, all heads at once. Returns losses, and how often each head is right on held-out text."""
    with random_of(training):
        return _train(options, training)


def _train(options: MedusaTraining, training: HeadTraining) -> dict[str, Any]:
    teacher = Teacher(training.model)
    vocab_size, width = teacher.head.weight.shape
    heads = MedusaHeads(options.num_heads, options.num_layers, width, vocab_size).to(teacher.device)
    heads.start_from(teacher.head.weight.float())

    def step_loss(seen: Seen) -> float:
        with torch.no_grad():
            wanted = teacher.distribution(seen.hidden[seen.batch.output])
        total = 0.0
        for distance, head in enumerate(heads, 1):
            rows, targets = pairs(seen.batch.output, distance)
            with teacher.autocast():
                logits = head(seen.hidden[rows].to(torch.float32))
            loss = F.cross_entropy(logits.float(), wanted[targets]) * options.decay ** (distance - 1)
            loss.backward()
            total += float(loss.detach())
        return total

    outputs = [head[-1].weight for head in heads]  # type: ignore[index]
    blocks = [each for each in heads.parameters() if all(each is not output for output in outputs)]
    figures = train([(blocks, 1.0), (outputs, _OUTPUT_SHARE)], training, teacher, step_loss)
    accuracy = measure_medusa(heads, teacher, training)
    config = {
        "model_type": "medusa", "medusa_num_heads": options.num_heads, "medusa_num_layers": options.num_layers,
        "hidden_size": width, "vocab_size": vocab_size, "medusa_accuracy": accuracy, **training.about,
        "training": figures,
    }  # fmt: skip
    dtype = teacher.head.weight.dtype
    tensors = {name: tensor.to(dtype) for name, tensor in heads.state_dict().items()}
    write_heads(training.output, MEDUSA_FILES[0], tensors, config)
    return {**figures, "held_out_top1": [row[0] for row in accuracy]}


def pairs(output: Tensor, distance: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Rows `(text, place)` whose distribution `distance` places on is known, and where it is among those of `output`.

    `output [B, T]` marks places whose next token is the model's own; they are one stretch per text.
    """
    number = torch.zeros_like(output, dtype=torch.int64)
    number[output] = torch.arange(int(output.sum()), device=output.device)
    both = output[:, :-distance] & output[:, distance:] if distance < output.shape[1] else output[:, :0]
    text, place = both.nonzero(as_tuple=True)
    return (text, place), number[text, place + distance]


@torch.no_grad()
def measure_medusa(heads: MedusaHeads, teacher: Teacher, training: HeadTraining) -> list[list[float]]:
    """Per head and rank, how often the guess is the model's most likely token on held-out text."""
    ranks = min(NUM_RANKS, teacher.head.weight.shape[0])
    hits = torch.zeros(len(heads), ranks)
    counts = torch.zeros(len(heads), 1)
    for text in training.held_out:
        seen = teacher.see(as_batch([text], teacher.device))
        likely = teacher.head(seen.hidden[seen.batch.output]).argmax(-1)
        for index, head in enumerate(heads):
            rows, targets = pairs(seen.batch.output, index + 1)
            if len(targets):
                guesses = head(seen.hidden[rows].float()).topk(ranks, dim=-1).indices
                hits[index] += (guesses == likely[targets][:, None]).float().sum(0).cpu()
                counts[index] += len(targets)
    shares = hits / counts.clamp(min=1)
    return [[round(each, 5) for each in row] for row in shares.tolist()]
