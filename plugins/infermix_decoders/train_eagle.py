"""The EAGLE draft layer by self-distillation: it learns the model's next hidden state and the tokens behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from infermix.errors import Unsupported
from infermix.roles.training import HeadTraining
from torch import Tensor, nn

from infermix_decoders.eagle_layer import EagleDraft, EagleShape, causal
from infermix_decoders.head_files import EAGLE_FILES, write_heads
from infermix_decoders.train_loop import Seen, Teacher, as_batch, random_of, train

if TYPE_CHECKING:
    from infermix_decoders.tree_options import EagleTraining


def train_eagle(options: EagleTraining, training: HeadTraining) -> dict[str, Any]:
    """Frozen base, head and embeddings. Returns losses, and how often the best guess is right on held-out text."""
    with random_of(training):
        return _train(options, training)


def _train(options: EagleTraining, training: HeadTraining) -> dict[str, Any]:
    teacher = Teacher(training.model)
    shape = shape_of(training.model)
    draft = EagleDraft(shape).to(teacher.device)
    embed = training.model.get_input_embeddings()
    even = even_inputs(teacher, embed, training)

    def one_pass(seen: Seen, features: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses `[B, T - 1, D]` of features 1 ... T - 1, and the loss on them."""
        ids, hidden = seen.batch.ids, seen.hidden
        positions = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
        with teacher.autocast():
            guessed = draft(
                features.float() / even.features, embed(ids[:, 1:]).float() / even.embeddings, positions, causal
            )
            rows = seen.batch.output[:, 1:]
            logits = F.linear(guessed[rows], teacher.head.weight.to(guessed.dtype))
        wanted, target = hidden[:, 1:][rows], guessed[rows].float()
        size = wanted.float().std().clamp(min=1e-6)
        apart = F.smooth_l1_loss(target / size, wanted.float() / size)
        tokens = F.cross_entropy(logits.float(), teacher.distribution(wanted))
        return guessed, tokens + options.feature_weight * apart

    def step_loss(seen: Seen) -> float:
        noise = (torch.rand_like(seen.hidden, dtype=torch.float32) - 0.5) * 0.2 * seen.hidden.float().std()
        guessed, loss = one_pass(seen, (seen.hidden.float() + noise)[:, :-1])
        total = float(loss.detach())
        loss.backward()
        if options.own_features:
            # Feature 0 has no guess; behind it, what the layer itself said of each place.
            own = torch.cat((seen.hidden[:, :1].float(), guessed.detach().float()[:, :-1]), dim=1)
            (options.own_features * one_pass(seen, own)[1]).backward()
        return total

    figures = train([(list(draft.parameters()), 1.0)], training, teacher, step_loss)
    even.fold_into(draft.fc)
    right = measure_eagle(draft, teacher, training)
    dtype = teacher.head.weight.dtype
    tensors = {name: tensor.to(dtype) for name, tensor in draft.state_dict().items()}
    write_heads(training.output, EAGLE_FILES[0], tensors, {**config_of(shape), **training.about, "training": figures})
    return {**figures, "held_out_top1": right}


@dataclass(frozen=True, slots=True)
class EvenInputs:
    """What hidden states and embeddings are divided by while the layer learns: their standard deviations.

    Embeddings are often ten times smaller than hidden states, and Adam moves every weight at the same pace: without
    this, the layer takes long to hear the token that was drawn. Published layers take raw inputs, so it is folded
    into the first linear map in the end.
    """

    features: float
    embeddings: float

    @torch.no_grad()
    def fold_into(self, first: nn.Linear) -> None:
        """`first` reads embeddings in its first half of columns, hidden states in its second."""
        width = first.in_features // 2
        first.weight[:, :width] /= self.embeddings
        first.weight[:, width:] /= self.features


@torch.no_grad()
def even_inputs(teacher: Teacher, embed: nn.Module, training: HeadTraining) -> EvenInputs:
    """Measured on what the model said in the first samples."""
    batch = as_batch(training.samples[:8], teacher.device)
    return EvenInputs(*(_size(each[batch.output]) for each in (teacher.see(batch).hidden, embed(batch.ids))))


def _size(values: Tensor) -> float:
    """1 where there is nothing to measure."""
    found = float(values.float().std()) if values.numel() > 1 else 0.0
    return found if found > 0 else 1.0


def shape_of(model: Any) -> EagleShape:
    """A layer of the target's own sizes. Raises `Unsupported` where its config does not tell them."""
    config = model.config.get_text_config(decoder=True)
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in names if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise Unsupported(
            f"the config of {config.model_type} does not tell {missing[0]}, which a draft layer takes over"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return EagleShape(
        config.hidden_size, config.intermediate_size, heads, kv_heads, dim, rope_theta=10000.0, eps=1e-6, bias=True
    )


def config_of(shape: EagleShape) -> dict[str, Any]:
    """As published: that of a Llama of one layer."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": shape.width, "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "rope_theta": shape.rope_theta, "rms_norm_eps": shape.eps, "bias": shape.bias,
    }  # fmt: skip


@torch.no_grad()
def measure_eagle(draft: EagleDraft, teacher: Teacher, training: HeadTraining) -> float:
    """How often the likeliest guess from the true feature is the model's most likely token."""
    hits = count = 0
    embed = training.model.get_input_embeddings()
    for text in training.held_out:
        seen = teacher.see(as_batch([text], teacher.device))
        ids = seen.batch.ids
        positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
        guessed = draft(seen.hidden[:, :-1].float(), embed(ids[:, 1:]).float(), positions, causal)
        rows = seen.batch.output[:, 1:]
        said = teacher.head(guessed[rows].to(teacher.head.weight.dtype)).argmax(-1)
        hits += int((said == teacher.head(seen.hidden[:, 1:][rows]).argmax(-1)).sum())
        count += int(rows.sum())
    return hits / max(count, 1)
