"""Fixtures of `engine_fixtures`, for the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "joint"))

from engine_fixtures import build_engine, catalogue, tiny_llama  # noqa: F401
