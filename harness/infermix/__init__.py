"""Mix LLM inference parts, run every combination, and publish numbers that can be trusted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infermix.api import leaderboard, plan, run

    __version__: str

__all__ = ["__version__", "leaderboard", "plan", "run"]


def __getattr__(name: str) -> Any:
    """Names resolve on first use, so that importing the package costs nothing."""
    if name == "__version__":
        return _version()
    if name in __all__:
        return getattr(import_module("infermix.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("infermix")
    except PackageNotFoundError:
        return "unknown"
