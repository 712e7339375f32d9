"""The engine builder of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from engine_fixtures import build_engine, catalogue, tiny_llama  # noqa: F401
