"""Random draft heads, written as decoders load them."""

from __future__ import annotations

from pathlib import Path

import torch
from infermix_decoders.eagle_layer import EagleDraft, EagleShape
from infermix_decoders.head_files import EAGLE_FILES, MEDUSA_FILES, write_heads
from infermix_decoders.medusa_heads import MedusaHeads
from infermix_decoders.train_eagle import config_of


def write_medusa(folder: Path, *, width: int, vocab_size: int, num_heads: int = 3) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        heads = MedusaHeads(num_heads, 1, width, vocab_size)
    write_heads(folder, MEDUSA_FILES[0], heads.state_dict(), {"medusa_num_heads": num_heads, "medusa_num_layers": 1})


def write_eagle(folder: Path, *, width: int, bias: bool = True) -> None:
    shape = EagleShape(width, 2 * width, 4, 2, width // 4, rope_theta=10000.0, eps=1e-6, bias=bias)
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        draft = EagleDraft(shape)
    write_heads(folder, EAGLE_FILES[0], draft.state_dict(), config_of(shape))
