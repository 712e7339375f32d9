"""GGUF -> safetensors, once per file: transformers' reader is slow, and its result cannot be saved as it is."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infermix import paths
from infermix.cost.gguf_header import read_gguf_header
from infermix.errors import UserError

#: Part of the cache key: raise it when the conversion changes what it writes.
_CONVERSION = 1


def converted_gguf(file: Path, progress: Callable[[str, float], None]) -> Path:
    """A directory with config, tokenizer and fp32 safetensors made from `file`; converts on the first call.

    Keyed by the file's content. Complete or absent: it is built aside and renamed; a second process waits.
    Raises `UserError` when the file is missing, is no GGUF, or is truncated.
    """
    read_gguf_header(file)
    target = paths.cache_dir("models") / _digest(file)
    if target.exists():
        return target
    with _lock(target.with_suffix(".lock")):
        if not target.exists():
            progress("convert", 0.0)
            _convert_aside(file, target)
            progress("convert", 1.0)
    return target


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"gguf-{_CONVERSION}-{content[:24]}"


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers' own bars would break ours; they come back afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _convert_aside(file: Path, target: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        _convert(file, aside)
        os.rename(aside, target)
    except OSError as error:
        raise UserError(f"cannot convert {file.name}: {error}", where=str(target.parent)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _convert(file: Path, directory: Path) -> None:
    with without_progress_bars():
        _read_and_save(file, directory)


def _read_and_save(file: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    model = _read_gguf(file)
    # transformers refuses to save a model that it loaded from GGUF, although the weights are dense by now.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def _read_gguf(file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    try:
        return loader.from_pretrained(file.parent, dtype=torch.float32, gguf_file=file.name, **_dequantize())
    except (ValueError, KeyError, EOFError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot be read as a model: {reason}", where=str(file), hint="is it truncated?") from error


def _dequantize() -> dict[str, Any]:
    """transformers from 5.18 on keeps GGUF blocks unless told otherwise; before, it always dequantizes."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}
