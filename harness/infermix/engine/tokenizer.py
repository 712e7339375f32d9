"""`roles.engine.Tokenizer` over a transformers tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infermix.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


class HfTokenizer:
    """Adds nothing that was not asked for: `encode` has no BOS, `apply_chat` what the chat template writes."""

    def __init__(self, tokenizer: Any, label: str) -> None:
        self._tokenizer, self._label = tokenizer, label
        self.eos_token_ids: tuple[int, ...] = as_ids(tokenizer.eos_token_id)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.special_token_ids: tuple[int, ...] = special_ids(tokenizer)
        self.vocab_size: int = len(tokenizer)

    @property
    def backend(self) -> Any:
        """The transformers tokenizer, for libraries that read a whole vocabulary."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; spaces stay as the tokens have them."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The conversation, ready for the assistant's turn. Raises `UserError` without a chat template."""
        return self._chat(messages, tokenize=True)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of which `apply_chat` gives the tokens. Raises `UserError` without a chat template."""
        return self._chat(messages, tokenize=False)

    def _chat(self, messages: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
        if not self._tokenizer.chat_template:
            raise UserError(f"{self._label} has no chat template", hint="give plain text prompts instead of messages")
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=tokenize, return_dict=False
        )


def read_tokenizer(directory: Path, label: str, trust_remote_code: bool) -> HfTokenizer | None:
    """The tokenizer of a model directory; `None` when it holds none. Raises `UserError` when it is broken."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
    if not any((directory / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the tokenizer cannot be read: {error}", where=str(directory)) from error
    return HfTokenizer(tokenizer, label)


def special_ids(tokenizer: Any) -> tuple[int, ...]:
    """Every token that no text contains: the named ones, and those that were added as special."""
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return tuple(sorted({*tokenizer.all_special_ids, *added}))


def as_ids(value: Any) -> tuple[int, ...]:
    """Token ids of a config value that is an int, a list, or nothing."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(item) for item in value)
