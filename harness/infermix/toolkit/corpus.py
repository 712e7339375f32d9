"""Text corpora: a file, or the documentation text that ships with Python itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from infermix.errors import UserError

#: The corpus that is always there, also offline. Its text differs between Python versions; the hash tells.
PYDOC_TOPICS = "pydoc_data.topics"


@dataclass(frozen=True)
class Corpus:
    """`label` is short, for metric names; `sha256` is the digest of `text` in UTF-8."""

    label: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_corpus(name: str, base: Path) -> Corpus:
    """The corpus called `name`: `pydoc_data.topics`, or a UTF-8 text file relative to `base`.

    Raises `UserError` for a file that is missing, empty, or not UTF-8.
    """
    if name == PYDOC_TOPICS:
        return _pydoc_topics()
    path = base / name
    text = _read_text(path)
    if not text.strip():
        raise UserError("the corpus is empty", where=str(path), hint="give a text file with some prose in it")
    return Corpus(path.stem, text)


def check_corpus(name: str, base: Path) -> None:
    """Raises `UserError` as `read_corpus` would."""
    if name != PYDOC_TOPICS:
        read_corpus(name, base)


def _pydoc_topics() -> Corpus:
    from pydoc_data.topics import topics

    return Corpus("pydoc_topics", "\n\n".join(topics[key] for key in sorted(topics)))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = f"give a path relative to {path.parent}, or {PYDOC_TOPICS}, which ships with Python"
        raise UserError("there is no such corpus file", where=str(path), hint=hint) from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: {error}", where=str(path), hint="convert the file to UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read the corpus: {error.strerror}", where=str(path)) from None
