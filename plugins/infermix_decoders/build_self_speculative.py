"""The target without some of its layers as its own draft model: no further weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from infermix.errors import Unsupported, UserError
from infermix.paths import cache_dir
from infermix.record.store import write_atomically
from infermix.toolkit.calibration import draw_calibration

from infermix_decoders.draft_length import DraftLength
from infermix_decoders.layer_search import PATIENCE, Skipped, fingerprint, search_layers
from infermix_decoders.skipped_layers import facts_of_kept, keep_layers
from infermix_decoders.speculative import SpeculativeDecoder

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext

    from infermix_decoders.options import SelfSpeculativeOptions


def build_self_speculative(options: SelfSpeculativeOptions, context: DecoderContext) -> SpeculativeDecoder:
    """Raises `UserError` for layers that the model does not have, `Unsupported` for a model without such layers."""
    if context.second is None or context.model is None:
        raise Unsupported("this engine offers no second model, which decoder self_speculative needs")
    skipped, details = _choice(options, context)
    kept = [index for index in range(context.facts.num_layers) if index not in skipped]
    facts = facts_of_kept(context.facts, kept)
    second = context.second(model=keep_layers(context.model, kept), facts=facts)
    ratio = facts.weight_bytes / max(context.facts.weight_bytes, 1)
    decoder = SpeculativeDecoder(
        second,
        DraftLength(options.num_draft_tokens, adaptive=options.adaptive, cost_ratio=ratio),
        context.max_model_len,
        acceptance=options.acceptance,
        uniform_steps=context.device.startswith("cuda"),
        clock_ns=context.clock_ns,
    )
    decoder.details = {"skipped_layers": list(skipped), "draft_layers": len(kept), **details}
    return decoder


def _choice(options: SelfSpeculativeOptions, context: DecoderContext) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Layers to skip, and for the record how they were found."""
    for misfit in options.misfits(context.facts):
        raise UserError(misfit, key="parts.decoder.skip_layers")
    return (options.skip_layers, {}) if options.skip_layers else _searched(options, context)


def _searched(options: SelfSpeculativeOptions, context: DecoderContext) -> tuple[tuple[int, ...], dict[str, Any]]:
    facts = context.facts
    calibration = draw_calibration(
        options.calibration,
        context.tokenizer,
        vocab_size=facts.vocab_size,
        max_tokens=facts.max_position_embeddings,
        base=context.base or Path(),
        key="parts.decoder.calibration",
    )

    def cost_of(num_kept: int) -> float:
        return facts_of_kept(facts, range(num_kept)).weight_bytes / facts.weight_bytes

    def search() -> Skipped:
        return search_layers(
            context.model,
            calibration.samples,
            cost_of,
            options.num_draft_tokens,
            lambda fraction: context.progress("search layers", fraction),
        )

    question = [fingerprint(context.model), calibration.samples, options.num_draft_tokens, PATIENCE]
    found = _remembered(hashlib.sha256(msgspec.json.encode(question)).hexdigest(), search)
    figures = {"agreement": found.agreement, "expected_speedup": found.speedup}
    return found.layers, {**figures, "calibration": dict(calibration.facts)}


def _remembered(key: str, search: Callable[[], Skipped]) -> Skipped:
    """The answer to the same question on this machine, or a new one. What cannot be read is asked again."""
    path = cache_dir("draft_layers") / f"{key}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Skipped)
    except (OSError, msgspec.DecodeError):
        found = search()
        write_atomically(path, msgspec.json.encode(found))
        return found
