"""Medusa heads from a checkpoint, checked against the model that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import Unsupported, UserError
from infermix.toolkit.tree_verification import TreeDecoder

from infermix_decoders.head_files import MEDUSA_FILES, check_shapes, number_of, read_config, read_tensors
from infermix_decoders.medusa import MedusaDrafter
from infermix_decoders.medusa_guesses import HeadGuesses
from infermix_decoders.medusa_heads import MedusaHeads
from infermix_decoders.medusa_tree import assumed_accuracy, best_tree

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext

    from infermix_decoders.tree_options import MedusaOptions

_KEY = "parts.decoder.heads"
#: Ranks per head that a tree chooses from.
NUM_RANKS = 10
_PREFIX = "medusa_head."


def build_medusa(options: MedusaOptions, context: DecoderContext) -> TreeDecoder:
    """Raises `UserError` for heads that are missing, pickled, broken, or made for another model."""
    output = output_weight(context.model)
    folder = (context.base or Path()) / options.heads
    heads, accuracy = load_medusa(folder, output)
    shape = best_tree(accuracy, options.num_draft_tokens)
    guesses = HeadGuesses(heads, shape, context.max_num_seqs, output)
    told = _captured(guesses, context)
    common: dict[str, Any] = {"uniform": context.device.startswith("cuda"), "clock_ns": context.clock_ns}
    given = (MedusaDrafter(guesses, shape), len(heads), context.max_model_len)
    if options.acceptance == "typical":
        from infermix_decoders.typical import TypicalTreeDecoder

        decoder: TreeDecoder = TypicalTreeDecoder(*given, epsilon=options.epsilon, delta=options.delta, **common)
    else:
        decoder = TreeDecoder(*given, **common)
    decoder.details = {
        "heads": len(heads),
        "head_bytes": sum(tensor.numel() * tensor.element_size() for tensor in heads.state_dict().values()),
        "tree_nodes": len(shape.parents),
        "tree_nodes_by_depth": [shape.depths.count(depth) for depth in range(1, max(shape.depths) + 1)],
        "graphs": told,
    }
    return decoder


def _captured(guesses: HeadGuesses, context: DecoderContext) -> dict[str, Any]:
    """Capture the heads where the engine captures work; what was, or the reason, for the record."""
    try:
        for done in guesses.capture_all(context.capture):
            context.progress("capture drafter", done)
    except Unsupported as refusal:
        guesses.launch()
        return {"captured": 0, "reason": str(refusal)}
    return {"captured": len(guesses.batches), "batches": list(guesses.batches)}


def output_weight(model: Any) -> torch.Tensor:
    """`[V, D]` of the model's own head. Raises `Unsupported` where it is not a plain matrix."""
    head = model.get_output_embeddings() if model is not None else None
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise Unsupported("draft heads need a model whose own head is a plain matrix (quantizers may skip it)")
    return weight


def load_medusa(folder: Path, output: torch.Tensor) -> tuple[MedusaHeads, list[list[float]]]:
    """Heads in the dtype and on the device of `output [V, D]`, and how often each guess of each is right."""
    config = read_config(folder, _KEY)
    tensors = read_tensors(folder, MEDUSA_FILES, _KEY)
    if any(name.startswith(_PREFIX) for name in tensors):  # published beside a whole model
        tensors = {name[len(_PREFIX) :]: each for name, each in tensors.items() if name.startswith(_PREFIX)}
    num_heads = number_of(config, "medusa_num_heads", folder)
    num_layers = number_of(config, "medusa_num_layers", folder, 1)
    vocab_size, width = output.shape
    with torch.device("meta"):
        heads = MedusaHeads(num_heads, num_layers, width, vocab_size)
    check_shapes(tensors, heads.state_dict(), folder, _KEY)
    heads.load_state_dict(tensors, assign=True)
    heads.to(output.device, output.dtype).requires_grad_(False)
    accuracy = config.get("medusa_accuracy") or assumed_accuracy(num_heads, min(NUM_RANKS, vocab_size))
    return heads, _checked(accuracy, num_heads, vocab_size, folder)


def _checked(accuracy: Any, num_heads: int, vocab_size: int, folder: Path) -> list[list[float]]:
    rows = accuracy if isinstance(accuracy, list) else []
    good = len(rows) == num_heads and all(isinstance(row, list) and 0 < len(row) <= vocab_size for row in rows)
    if not good or not all(isinstance(each, int | float) and 0 <= each <= 1 for row in rows for each in row):
        raise UserError(
            f"medusa_accuracy must be {num_heads} lists of 1 to {vocab_size} shares between 0 and 1",
            where=str(folder / "config.json"),
            key="medusa_accuracy",
        )
    return rows
