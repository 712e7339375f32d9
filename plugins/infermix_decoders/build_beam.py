"""Beam search for the engine that is being assembled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import Unsupported

from infermix_decoders.beam import BeamDecoder
from infermix_decoders.beam_ranking import Ranking
from infermix_decoders.beam_search import num_candidates

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext

    from infermix_decoders.options import BeamOptions


def build_beam(options: BeamOptions, context: DecoderContext) -> BeamDecoder:
    eos, num_beams = context.eos_token_ids, options.num_beams
    counts = {num_candidates(num_beams, num_stops) for num_stops in (0, len(set(eos)))}
    most = max(1, context.max_num_seqs // num_beams)
    dtype = getattr(torch, context.dtype)
    ranking = Ranking(num_beams, sorted(counts), most, context.facts.vocab_size, context.device, dtype)
    decoder = BeamDecoder(options, eos, ranking)
    decoder.details = {"graphs": _captured(ranking, context)}
    return decoder


def _captured(ranking: Ranking, context: DecoderContext) -> dict[str, Any]:
    """Capture the ranking where the engine captures work; what was, or the reason, for the record."""
    try:
        for done in ranking.capture_all(context.capture):
            context.progress("capture ranking", done)
    except Unsupported as refusal:
        ranking.launch()
        return {"captured": 0, "reason": str(refusal)}
    return {"captured": ranking.num_captured, "groups": list(ranking.batches)}
