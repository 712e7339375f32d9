"""Draft heads of the example model, for the decoders that load some."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from infermix.toolkit.conformance import example_model

sys.path.insert(0, str(Path(__file__).parent.parent / "decoders"))

from draft_heads import write_eagle, write_medusa


@pytest.fixture(scope="session")
def heads_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `medusa` and `eagle`."""
    folder, model = tmp_path_factory.mktemp("heads"), example_model()
    write_medusa(folder / "medusa", width=model.hidden_size, vocab_size=model.vocab_size)
    write_eagle(folder / "eagle", width=model.hidden_size)
    return folder


@pytest.fixture
def beside_heads(heads_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(heads_folder)
