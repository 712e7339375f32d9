"""A text cut into prompts of equal length."""

from __future__ import annotations

from collections.abc import Iterator

from infermix.roles.engine import Tokenizer
from infermix.roles.workload import WorkloadContext
from infermix.toolkit.corpus import read_corpus
from infermix.workload.assemble import ListSource, Prompt
from infermix.workload.components import CorpusOptions
from infermix.workload.prompts import check_enough, check_fits, require_tokenizer

#: Paragraphs are tokenized in pieces of about this many characters, until there are tokens enough.
PIECE_CHARACTERS = 1 << 16


def cut_corpus(options: CorpusOptions, context: WorkloadContext) -> ListSource:
    """Prompt i is tokens `[i * input_tokens, (i + 1) * input_tokens)` of the text, in its own order.

    With `vary` the whole text is cut and each repeat goes on where the last one stopped. Raises `UserError` when the
    text is missing or too short, when a request does not fit the model, or when there is no tokenizer.
    """
    tokenizer = require_tokenizer(context.tokenizer, "corpus")
    size = options.input_tokens
    check_fits(size, options.max_new_tokens, context.max_model_len, None)
    text = read_corpus(options.path, context.base).text
    token_ids = _tokens(text, tokenizer, None if options.vary else options.num_requests * size)
    cuts = range(0, len(token_ids) - size + 1, size)
    prompts = [Prompt(tuple(token_ids[start : start + size]), options.max_new_tokens) for start in cuts]
    check_enough(len(prompts), options.num_requests, options.repeat_prompts, options.path)
    return ListSource(prompts, options.num_requests, (size, size))


def _tokens(text: str, tokenizer: Tokenizer, enough: int | None) -> list[int]:
    token_ids: list[int] = []
    for piece in _pieces(text):
        token_ids.extend(tokenizer.encode(piece))
        if enough is not None and len(token_ids) >= enough:
            return token_ids[:enough]
    return token_ids


def _pieces(text: str) -> Iterator[str]:
    """The text in order, divided before blank lines only."""
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + PIECE_CHARACTERS)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end
