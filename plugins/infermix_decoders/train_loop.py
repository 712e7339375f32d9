"""The loop that trains draft heads: texts in batches, one optimiser, a loss that a method computes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from infermix.errors import Unsupported
from infermix.roles.training import HeadTraining, OwnOutput
from torch import Tensor, nn

_WARM_UP = 0.05
_LARGEST_GRADIENT = 1.0


@dataclass(slots=True)
class TextBatch:
    """`ids [B, T]`, padded behind; `output [B, T]` bool: the next token is the model's own, and known."""

    ids: Tensor
    output: Tensor


@dataclass(slots=True)
class Seen:
    """What the frozen model makes of a batch: `hidden [B, T, D]` that its head reads."""

    batch: TextBatch
    hidden: Tensor


class Teacher:
    """The frozen model. Raises `Unsupported` for one whose head or body cannot be reached."""

    def __init__(self, model: Any) -> None:
        body = getattr(model, model.base_model_prefix, None)
        head = model.get_output_embeddings()
        if body is None or body is model or not isinstance(getattr(head, "weight", None), Tensor):
            raise Unsupported(f"{type(model).__name__} has no body and head of its own that draft heads could read")
        self.model, self._body, self.head = model, body, head
        self.device: torch.device = model.device

    @torch.no_grad()
    def see(self, batch: TextBatch) -> Seen:
        return Seen(batch, self._body(input_ids=batch.ids, use_cache=False)[0])

    @torch.no_grad()
    def distribution(self, hidden: Tensor) -> Tensor:
        """`[N, D]` -> `[N, V]` probabilities of the next token."""
        return torch.softmax(self.head(hidden).float(), dim=-1)

    def autocast(self) -> Any:
        on = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on)


@contextmanager
def random_of(training: HeadTraining) -> Iterator[None]:
    """First weights and noise are drawn from `training.seed`; the generators are left as they were."""
    device = training.model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(training.seed)
        yield


def as_batch(texts: Seq[OwnOutput], device: torch.device) -> TextBatch:
    width = max(len(text.token_ids) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    output = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        length = len(text.token_ids)
        ids[row, :length] = torch.tensor(text.token_ids)
        output[row, text.num_prompt_tokens - 1 : length - 1] = True
    return TextBatch(ids.to(device), output.to(device))


def batches(texts: Seq[OwnOutput], batch_tokens: int, seed: int) -> Iterator[list[OwnOutput]]:
    """Random texts for ever, as many as fit `batch_tokens` with their padding, at least one."""
    rng = random.Random(seed)
    chosen: list[OwnOutput] = []
    width = 0
    while True:
        for text in rng.sample(list(texts), len(texts)):
            wider = max(width, len(text.token_ids))
            if chosen and wider * (len(chosen) + 1) > batch_tokens:
                yield chosen
                chosen, wider = [], len(text.token_ids)
            chosen.append(text)
            width = wider


def train(
    groups: Seq[tuple[Seq[nn.Parameter], float]],
    training: HeadTraining,
    teacher: Teacher,
    step_loss: Callable[[Seen], float],
) -> dict[str, float]:
    """Adam under a cosine; `step_loss` runs backward itself and returns the loss. The figures tell how it went.

    `groups` are parameters, each with the share of the learning rate that they get. Raises `Unsupported` when the
    loss stops being a number.
    """
    parameters = [parameter for group, _ in groups for parameter in group]
    optimiser = torch.optim.AdamW(
        [{"params": list(group), "share": share} for group, share in groups],
        lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.0,
    )  # fmt: skip
    source = batches(training.samples, training.batch_tokens, training.seed)
    losses: list[float] = []
    while (share := training.share_done(len(losses))) < 1:
        for group in optimiser.param_groups:
            group["lr"] = training.learning_rate * group["share"] * _schedule(share)
        optimiser.zero_grad(set_to_none=True)
        loss = step_loss(teacher.see(as_batch(next(source), teacher.device)))
        if not math.isfinite(loss):
            raise Unsupported(f"the loss is {loss} at step {len(losses) + 1}: lower the learning rate")
        nn.utils.clip_grad_norm_(parameters, _LARGEST_GRADIENT)
        optimiser.step()
        losses.append(loss)
        training.progress(len(losses), loss)
    tenth = max(1, len(losses) // 10)
    return {
        "steps": float(len(losses)),
        "first_loss": sum(losses[:tenth]) / max(1, len(losses[:tenth])),
        "last_loss": sum(losses[-tenth:]) / max(1, len(losses[-tenth:])),
    }


def _schedule(share: float) -> float:
    if share < _WARM_UP:
        return 0.1 + 0.9 * share / _WARM_UP
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))
