"""What a component is trained with: draft heads of decoders. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infermix.roles.component import Options


@dataclass(frozen=True, slots=True)
class OwnOutput:
    """A text of the model: `token_ids` are a prompt of `num_prompt_tokens` and what the model made of it.

    `origin` tells where the prompt comes from: `corpus`, or `self` for one that the model wrote.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    origin: str = "corpus"

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """A frozen model, its own texts, and how long to train.

    A step takes `batch_tokens` tokens of `samples`. `share_done(step)` in [0, 1] is 1 when training must end, by
    steps or by time. `held_out` texts are for figures alone. `progress(step, loss)` is told every step.
    """

    model: Any
    samples: tuple[OwnOutput, ...]
    held_out: tuple[OwnOutput, ...]
    batch_tokens: int
    learning_rate: float
    seed: int
    output: Path
    about: Mapping[str, Any]
    share_done: Callable[[int], float]
    progress: Callable[[int, float], None] = lambda step, loss: None


@dataclass(frozen=True)
class Trainer:
    """How a component trains what it loads. `train(options, training)` writes `training.output`, returns figures.

    Among the figures are `first_loss` and `last_loss` (means over the first and last tenth of the steps). Raises
    `Unsupported` for a model that it cannot train for.
    """

    options: type[Options]
    train: Callable[[Any, HeadTraining], Mapping[str, Any]]
