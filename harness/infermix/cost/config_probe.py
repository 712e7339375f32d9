"""Asks transformers, in a child process, what a config leaves unsaid. Answers are cached by content."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infermix.cost.header_cache import FORMAT, remembered
from infermix.cost.tensors import TensorInfo
from infermix.errors import UserError
from infermix.roles.facts import StateTensor

_TIMEOUT_S = 180


@dataclass(frozen=True)
class Probe:
    """A resolved config, its model class, its weights (tied ones once), and what its attention layers are handed.

    `traced`: the layers were seen in a forward pass on the meta device; otherwise they were read off the modules.
    `states`: what each recurrent layer carries; `None` when the model could not be run on the meta device.
    """

    config: Mapping[str, Any]
    architecture: str
    tensors: tuple[TensorInfo, ...]
    attention: tuple[Mapping[str, Any], ...]
    traced: bool
    states: Mapping[int, tuple[StateTensor, ...]] | None


def probe_config(config: Mapping[str, Any], *, where: str, directory: str, trust_remote_code: bool) -> Probe:
    """Takes about four seconds the first time. Raises `UserError` when transformers cannot build the model."""
    request = json.dumps(
        {"config": dict(config), "directory": directory, "trust_remote_code": trust_remote_code}, sort_keys=True
    )
    version = importlib.metadata.version("transformers")
    # the directory matters only where its own code is run
    identity = request if trust_remote_code else json.dumps(dict(config), sort_keys=True)
    key = hashlib.sha256(f"{FORMAT}\0{version}\0{identity}".encode()).hexdigest()[:32]
    answer = remembered(f"config-{key}.json", lambda: _ask(request, where))
    return Probe(
        config=answer["config"],
        architecture=answer["architecture"],
        tensors=tuple(TensorInfo(name, tuple(shape)) for name, shape in answer["tensors"]),
        attention=tuple(answer["attention"]),
        traced=answer["traced"],
        states=None if answer["states"] is None else dict(_states(answer["states"])),
    )


def _states(answer: Mapping[str, Any]) -> Iterator[tuple[int, tuple[StateTensor, ...]]]:
    """The model was bfloat16: what is in that dtype follows the model's, the rest stays as it is."""
    for index, kept in answer.items():
        tensors = (
            StateTensor(name, tuple(shape), None if dtype == "bfloat16" else dtype) for name, shape, dtype in kept
        )
        yield int(index), tuple(tensors)


def _ask(request: str, where: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "infermix.cost.config_probe_child"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"transformers took over {_TIMEOUT_S} s to build this config", where=where) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise UserError(f"resolving the config failed: {done.stderr.strip()[-500:]}", where=where)
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise UserError(f"transformers cannot build this config: {answer['error']}", where=where)
    return answer
