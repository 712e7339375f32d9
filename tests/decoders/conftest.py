"""The engine builder of the engine tests, with draft heads of the tiny model beside it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from draft_heads import write_eagle, write_medusa
from engine_fixtures import build_engine as plain_engine  # noqa: F401
from engine_fixtures import catalogue, tiny_llama  # noqa: F401


@pytest.fixture(scope="session")
def heads_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads for the tiny model, in folders `medusa` and `eagle`."""
    base = tmp_path_factory.mktemp("heads")
    write_medusa(base / "medusa", width=64, vocab_size=96)
    write_eagle(base / "eagle", width=64)
    return base


@pytest.fixture
def build_engine(plain_engine: Callable[..., Any], heads_base: Path) -> Callable[..., Any]:  # noqa: F811
    return functools.partial(plain_engine, base=heads_base)
