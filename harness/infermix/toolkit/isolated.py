"""Quantizers that work in an environment of their own, as a plugin declares them. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from infermix.errors import Unsupported
from infermix.roles.environment import Environment

if TYPE_CHECKING:
    from torch import nn

    from infermix.roles.quantizer import QuantizationReport, QuantizerContext

#: What broken checkpoints exceed by far and usable ones of 4 bits seldom reach.
MOST_PERPLEXITY_RATIO = 1.5


@dataclass(frozen=True, kw_only=True)
class IsolatedQuantizer:
    """A quantizer whose work is a job before the cell; the cell loads the checkpoint that the job leaves.

    `script` runs in `environment` (`toolkit.isolated_worker` says what it defines) with `options`, on the token ids
    of our calibration. `group_size` (0: whole rows) has to divide the width of every linear. `config_form` is the
    form of `config.json` that its transformers understands. `reader` names the quantizer that reads the standard
    checkpoint, `method` is short and for tables. A checkpoint whose perplexity is more than `most_perplexity_ratio`
    times that of the unquantized model is wrong.
    """

    name: str
    method: str
    environment: Environment
    script: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 0
    config_form: Literal["transformers-4", "transformers-5"] = "transformers-5"
    reader: str = "checkpoint"
    most_perplexity_ratio: float = MOST_PERPLEXITY_RATIO

    @property
    def script_sha256(self) -> str:
        return hashlib.sha256(self.script.read_bytes()).hexdigest()

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Never converts a loaded model: raises `Unsupported`."""
        raise Unsupported(
            f"quantizer {self.name!r} makes a checkpoint from files, it does not convert a loaded model"
        )
