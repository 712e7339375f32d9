"""The draft model of an experiment, checked against the target before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported

from infermix_decoders.draft_length import DraftLength
from infermix_decoders.speculative import SpeculativeDecoder

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext
    from infermix.roles.engine import Tokenizer

    from infermix_decoders.options import SpeculativeOptions

#: Spaces, capitals, numbers, another script and code: tokenizers that agree here and in size are the same.
_PROBE = "The quick brown fox, 1984: naïve café\n\tdef f(x):  return x ** 2  # 你好 😀"


def build_speculative(options: SpeculativeOptions, context: DecoderContext) -> SpeculativeDecoder:
    """Raises `Unsupported` when draft and target do not share a vocabulary."""
    if context.second is None:
        raise Unsupported("this engine offers no second model, which decoder speculative needs")
    source = None if options.draft == "target" else options.draft
    second = context.second(source, options.draft_quantizer, options.draft_quantizer_options)
    refuse_other_vocabulary(second, context)
    decoder = SpeculativeDecoder(
        second,
        DraftLength(options.num_draft_tokens, adaptive=options.adaptive, cost_ratio=_cost_ratio(second, context)),
        context.max_model_len,
        acceptance=options.acceptance,
        uniform_steps=context.device.startswith("cuda"),
        clock_ns=context.clock_ns,
    )
    decoder.details = {"draft_weight_bytes": second.weight_bytes, "draft_kv_bytes": second.kv_bytes}
    return decoder


def refuse_other_vocabulary(second: Any, context: DecoderContext) -> None:
    """Raises `Unsupported` where token ids of the draft would mean something else to the target."""
    draft, target = second.facts.vocab_size, context.facts.vocab_size
    if draft != target:
        raise Unsupported(f"the draft model has {draft} tokens in its vocabulary, the target {target}")
    ids = [_probe(second.tokenizer), _probe(context.tokenizer)]
    if None not in ids and ids[0] != ids[1]:
        raise Unsupported("the draft model has another tokenizer than the target: the same text gives other tokens")


def _probe(tokenizer: Tokenizer | None) -> list[int] | None:
    return None if tokenizer is None else tokenizer.encode(_PROBE)


def _cost_ratio(second: Any, context: DecoderContext) -> float:
    """Of a draft forward to a target forward, by the weights that each reads, as a quantizer left them."""
    return float(second.weight_bytes / max(context.weight_bytes or context.facts.weight_bytes, 1))
