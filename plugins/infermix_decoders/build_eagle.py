"""An EAGLE draft layer from a checkpoint, checked against the model that it is for."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import Unsupported, UserError
from infermix.toolkit.tree_verification import TreeDecoder
from torch import Tensor, nn

from infermix_decoders.build_medusa import output_weight
from infermix_decoders.eagle import EagleDrafter
from infermix_decoders.eagle_cache import EagleCache
from infermix_decoders.eagle_extension import FEW, Extension, PaddedExtensions, PlainExtensions, numbers_of
from infermix_decoders.eagle_layer import EagleDraft, EagleShape
from infermix_decoders.eagle_round import GuessingRound, room_for_guesses
from infermix_decoders.eagle_rounds import PaddedRounds, PlainRounds, Rounds, RoundShapes
from infermix_decoders.head_files import EAGLE_FILES, check_shapes, number_of, read_config, read_tensors
from infermix_decoders.lane_rows import LaneRows

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext

    from infermix_decoders.tree_options import EagleOptions

_KEY = "parts.decoder.heads"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def build_eagle(options: EagleOptions, context: DecoderContext) -> TreeDecoder:
    """Raises `UserError` for a layer that is missing, pickled, broken, or made for another model."""
    output = output_weight(context.model)
    folder = (context.base or Path()) / options.heads
    draft, embedding = load_eagle(folder, output)
    shape = draft.shape
    embed: Any = context.model.get_input_embeddings()
    if embedding is not None:
        embed = nn.Embedding.from_pretrained(embedding.to(output.device, output.dtype))
    beam, num_nodes = min(options.beam, output.shape[0]), _num_nodes(options, output.shape[0])
    capacity = context.max_model_len + max(room_for_guesses(beam, options.depth), FEW)
    draft.tabulate(context.max_model_len + max(options.depth, FEW))
    cache = EagleCache(context.max_num_seqs, capacity, shape.num_kv_heads, shape.head_dim, output, spare=FEW)
    latest = LaneRows(context.max_num_seqs + 1, shape.width, output.device, output.dtype)
    guess = GuessingRound(
        draft, embed, context.model.get_output_embeddings(), cache, latest,
        beam=beam, depth=options.depth, num_nodes=num_nodes,
    )  # fmt: skip
    work, told = _device_work(guess, Extension(draft, embed, cache, latest), options.depth, capacity, context)
    drafter = EagleDrafter(cache, latest, *work, depth=options.depth, num_nodes=num_nodes)
    decoder = TreeDecoder(
        drafter, options.depth, context.max_model_len,
        uniform=context.device.startswith("cuda"), clock_ns=context.clock_ns,
    )  # fmt: skip
    decoder.details = {
        "draft_weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in draft.state_dict().values()),
        "draft_kv_bytes": cache.bytes,
        "tree_nodes": drafter.num_nodes,
        "graphs": told,
    }
    return decoder


def _device_work(
    guess: GuessingRound, extension: Extension, depth: int, capacity: int, context: DecoderContext
) -> tuple[tuple[Rounds, PlainExtensions | PaddedExtensions, PlainExtensions], dict[str, Any]]:
    """Rounds and passes over new pairs that are replayed where the engine captures them, passes over prompts, and
    what was captured, or the reason, for the record.

    All graphs are captured here: a step that is measured must not wait for one. A step of drafts brings at most as
    many pairs as a branch is long, and one more.
    """
    plain, device = PlainExtensions(extension), extension.device
    shapes = RoundShapes.up_to(context.max_num_seqs, capacity)
    most = min(FEW, depth + 1)
    rounds = PaddedRounds(guess, shapes, device, numbers_of(most))
    padded = PaddedExtensions(extension, rounds, most)
    try:
        for done in chain(rounds.capture_all(context.capture), padded.capture_all(context.capture)):
            context.progress("capture drafter", done)
    except Unsupported as refusal:
        return (PlainRounds(guess, device), plain, plain), {"captured": 0, "reason": str(refusal)}
    told = {"batches": list(shapes.batches), "reaches": list(shapes.reaches)}
    return (rounds, padded, plain), {"captured": 2 * len(shapes.batches) * len(shapes.reaches), **told}


def _num_nodes(options: EagleOptions, vocab_size: int) -> int:
    """No more than the guesses that a tree of this beam and depth has to choose from."""
    beam = min(options.beam, vocab_size)
    return min(options.num_draft_tokens, beam + (options.depth - 1) * beam * beam)


def load_eagle(folder: Path, output: Tensor) -> tuple[EagleDraft, Tensor | None]:
    """The layer in the dtype and on the device of `output [V, D]`, and the embedding that it may bring."""
    config = read_config(folder, _KEY)
    tensors = read_tensors(folder, EAGLE_FILES, _KEY)
    tensors.pop(_HEAD, None)  # the target's is used
    embedding = tensors.pop(_EMBEDDING, None)
    shape = _shape(config, folder, bias="fc.bias" in tensors)
    if shape.width != output.shape[1]:
        raise UserError(
            f"the draft layer is {shape.width} wide, the model {output.shape[1]}", where=str(folder), key=_KEY,
            hint="this layer was made for another model",
        )  # fmt: skip
    with torch.device("meta"):
        draft = EagleDraft(shape)
    check_shapes(tensors, draft.state_dict(), folder, _KEY)
    if embedding is not None:
        check_shapes({_EMBEDDING: embedding}, {_EMBEDDING: output}, folder, _KEY)
    draft.load_state_dict(tensors, assign=True)
    draft.to(output.device, output.dtype).requires_grad_(False)
    return draft, embedding


def _shape(config: dict[str, Any], folder: Path, *, bias: bool) -> EagleShape:
    width, heads = number_of(config, "hidden_size", folder), number_of(config, "num_attention_heads", folder)
    if number_of(config, "num_hidden_layers", folder, 1) != 1:
        raise Unsupported(f"{folder}: a draft of several layers; EAGLE's has one")
    if config.get("hidden_act", "silu") != "silu":
        raise Unsupported(f"{folder}: hidden_act is {config['hidden_act']!r}, EAGLE's layer has silu")
    kv_heads = number_of(config, "num_key_value_heads", folder, heads)
    head_dim = number_of(config, "head_dim", folder, max(1, width // heads))
    for name, value, unit in (("num_attention_heads", heads, kv_heads), ("head_dim", head_dim, 2)):
        if value % unit:
            where = str(folder / "config.json")
            raise UserError(f"{name} is {value}, which {unit} does not divide", where=where, key=name)
    return EagleShape(
        width=width,
        intermediate=number_of(config, "intermediate_size", folder),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=_rope_theta(config, folder),
        eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", folder),
        bias=bias,
    )


def _rope_theta(config: dict[str, Any], folder: Path) -> float:
    """Raises `UserError` for no such number, `Unsupported` where positions are scaled."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        where = str(folder / "config.json")
        raise UserError(f"rope_scaling is {rope!r}, expected an object", where=where, key="rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise Unsupported(f"{folder}: positions of the draft layer are scaled ({kind}), which is not implemented")
    return _positive(config.get("rope_theta", rope.get("rope_theta", 10000.0)), "rope_theta", folder)


def _positive(value: Any, name: str, folder: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        where = str(folder / "config.json")
        raise UserError(f"{name} is {value!r}, expected a number above 0", where=where, key=name)
    return float(value)
