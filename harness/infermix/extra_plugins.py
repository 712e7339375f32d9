"""Plugins without an entry point: a module name, or a `.py` file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from infermix.errors import UserError


def load_extra_plugins(names: Iterable[str]) -> dict[str, ModuleType]:
    """Import each; raises `UserError` that names the one which fails."""
    return {name: _load(name) for name in names}


def _load(name: str) -> ModuleType:
    try:
        return _load_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:  # a plugin may raise anything while it is imported
        raise UserError(f"the plugin {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
