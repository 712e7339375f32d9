"""Caches of these tests live in a folder of their own, shared by the session (a probe takes seconds)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def facts_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _own_cache(facts_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", facts_cache)
