"""The one place that knows where InferMix keeps its caches."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """`$XDG_CACHE_HOME/infermix/...` (default `~/.cache`), created on demand."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infermix"
    path = root.joinpath(*parts).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path
