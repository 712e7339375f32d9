"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import re
from typing import Any

from infermix.errors import Unsupported

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def bytes_of_tokens(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Of every id below `vocab_size`; empty for special tokens and ids without a token.

    Reads byte-level vocabularies (each character is a byte) and those of SentencePiece (a mark for the space, bytes
    as `<0xNN>`). Raises `Unsupported` for a tokenizer of another kind.
    """
    backend = getattr(tokenizer, "backend", None)
    special = set(getattr(tokenizer, "special_token_ids", ()))
    known = {} if backend is None else {number: token for token, number in backend.get_vocab().items()}
    if not known:
        raise Unsupported("token healing needs the vocabulary of a transformers tokenizer")
    decoder = str(getattr(getattr(backend, "backend_tokenizer", None), "decoder", ""))
    if "ByteLevel" in decoder:
        read = _byte_level
    elif "ByteFallback" in decoder or "Metaspace" in decoder or any("\u2581" in token for token in known.values()):
        read = _sentencepiece
    else:
        raise Unsupported("token healing reads byte-level and SentencePiece vocabularies, and this one is neither")
    return [b"" if number in special else read(known.get(number, "")) for number in range(vocab_size)]


def _byte_level(token: str) -> bytes:
    known = [_BYTE_OF.get(character) for character in token]
    return token.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _printable() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves and the others as characters from 256 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return {chr(byte if byte in plain else next(others)): byte for byte in range(256)}


_BYTE_OF = _printable()
