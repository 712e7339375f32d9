"""A quantizer in an environment of its own: its job, its gates, and the checkpoint that a cell then loads.

The gates of every job: the unquantized model has the same perplexity in both environments, and the quantized
checkpoint, read back here, stays below a multiple of it. What does not pass is never kept.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors.torch import save_file

from infermix import environments
from infermix.cost.safetensors_header import checkpoint_files
from infermix.engine.loader import LoadedModel, load_model, load_tokenizer
from infermix.errors import Unsupported, UserError, WrongResult
from infermix.paths import cache_dir
from infermix.roles.component import Role
from infermix.roles.facts import ResolvedSource
from infermix.roles.quantizer import QuantizationReport, Quantizer, QuantizerContext
from infermix.toolkit.calibration import CalibrationData, draw_calibration
from infermix.toolkit.corpus import read_corpus
from infermix.toolkit.isolated_worker import perplexity
from infermix.toolkit.linears import check_group_size, find_linears
from infermix.toolkit.old_config import transformers4_config
from infermix.toolkit.worker_process import run_worker

if TYPE_CHECKING:
    from infermix.roles.engine import EngineContext, Tokenizer
    from infermix.toolkit.calibration import CalibratedOptions
    from infermix.toolkit.isolated import IsolatedQuantizer

#: Part of the key: raised when what a job hands over or keeps changes.
_VERSION = 1
_FACTS = "infermix_isolated.json"
_CONFIG = "config.json"
#: Relative; both sides compute in fp32 on a CPU. A wrong rotary base moves SmolLM2's perplexity by 12 %.
SAME_PERPLEXITY = 0.005
_GATE_WINDOWS, _GATE_WINDOW_TOKENS, _GATE_CHARACTERS = 4, 512, 40_000
_BESIDE = ("*token*", "vocab*", "merges*", "special_tokens_map.json", "generation_config.json", "chat_template*")


@dataclass(frozen=True)
class Prepared:
    """`source` is the quantized checkpoint, `reader` reads it, `facts` are those of its job for the record."""

    source: ResolvedSource
    reader: Quantizer
    facts: Mapping[str, Any]

    def read(self, loaded: LoadedModel, context: EngineContext, *, tune: bool) -> QuantizationReport:
        """Replace the packed linears of the loaded checkpoint; the report names the method that made them."""
        report = self.reader.apply(loaded.model, _reader_context(loaded, context, tune=tune))
        details = {**report.details, **{key: value for key, value in self.facts.items() if key != "method"}}
        return replace(report, method=self.facts["method"], details=details)


def prepare(quantizer: IsolatedQuantizer, options: CalibratedOptions, context: EngineContext) -> Prepared:
    """The checkpoint of this model, method, options, calibration and environment: from the cache, or made now.

    Raises `UserError` when the environment is missing or the model has no files, `InfermixError` with the worker's
    last lines when it fails, `WrongResult` when a gate is not passed.
    """
    if context.source.kind == "dummy":
        raise UserError("random weights have no files", key="parts.quantizer", hint="name a real checkpoint")
    tokenizer = load_tokenizer(context.source)
    data = _calibration(options, context, tokenizer)
    target = cache_dir("quantized") / f"{quantizer.name}-{_key(quantizer, context, data)}"
    with _lock(target):
        kept = target.is_dir()
        if not kept:
            _Work(quantizer, options, context, data, tokenizer).make(target)
    facts = json.loads((target / _FACTS).read_text(encoding="utf-8"))
    gates = facts["gates"]  # the limit is no part of the key
    check_quantized(gates["unquantized_perplexity"], gates["quantized_perplexity"], quantizer)
    facts |= {"checkpoint": target.name, "from_cache": kept}
    return Prepared(_source(target, context), _reader(quantizer, context), facts)


def _calibration(options: CalibratedOptions, context: EngineContext, tokenizer: Tokenizer | None) -> CalibrationData:
    return draw_calibration(
        options.calibration, tokenizer, vocab_size=context.facts.vocab_size,
        max_tokens=context.facts.max_position_embeddings, base=context.base or Path(),
    )  # fmt: skip


def _key(quantizer: IsolatedQuantizer, context: EngineContext, data: CalibrationData) -> str:
    content = [
        _VERSION, context.facts.digest, dict(context.source.config), context.machine.device, quantizer.name,
        quantizer.script_sha256, dict(quantizer.options), quantizer.config_form, data.digest,
        quantizer.environment.digest,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Who comes second waits and finds the result."""
    with target.with_suffix(".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _source(directory: Path, context: EngineContext) -> ResolvedSource:
    return ResolvedSource(label=context.source.label, kind="safetensors", directory=directory)


def _reader(quantizer: IsolatedQuantizer, context: EngineContext) -> Quantizer:
    if context.find is None:
        raise UserError(f"this engine was built without a catalogue, so nothing reads what {quantizer.name!r} makes")
    registered = context.find(Role.QUANTIZER, quantizer.reader)
    if registered.unavailable:
        raise Unsupported(f"quantizer {quantizer.reader!r} {registered.unavailable}")
    reader: Quantizer = registered.component.build(registered.component.options(), None)
    return reader


def _reader_context(loaded: LoadedModel, context: EngineContext, *, tune: bool = False) -> QuantizerContext:
    return QuantizerContext(
        device=context.machine.device, dtype=context.dtype, progress=context.progress, tune=tune,
        directory=loaded.directory,
    )  # fmt: skip


class _Work:
    """One job, from the model's files to a checkpoint that has passed its gates."""

    def __init__(
        self,
        quantizer: IsolatedQuantizer,
        options: CalibratedOptions,
        context: EngineContext,
        data: CalibrationData,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._quantizer, self._options, self._data = quantizer, options, data
        # A CPU is slow and coarse in 16 bits: there the job computes in fp32, whatever the cell does.
        self._context = replace(context, dtype="float32") if context.machine.device == "cpu" else context
        self._windows = _gate_windows(options, context, data, tokenizer)
        self._events: dict[str, float] = {}

    def make(self, target: Path) -> None:
        """Complete or absent: built aside and renamed."""
        python = environments.find_python(self._quantizer.environment)
        if python is None:
            raise environments.missing(self._quantizer.environment)
        aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            source, ours = self._reference()
            response = self._run(python, aside / "job", source, ours)
            checkpoint = self._compose(aside, source, response["quantization_config"])
            quantized = self._read_back(checkpoint, ours)
            self._write_facts(checkpoint, response["figures"], ours, quantized)
            os.rename(checkpoint, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _reference(self) -> tuple[Path, float]:
        """The folder of the unquantized weights, and their perplexity here."""
        context = self._context
        context.progress(f"{self._quantizer.name}: unquantized model", 0.0)
        loaded = load_model(
            context.source, context.facts, dtype=context.dtype, device=context.machine.device,
            progress=context.progress,
        )  # fmt: skip
        assert loaded.directory is not None
        if self._quantizer.group_size:
            check_group_size(find_linears(loaded.model)[0], self._quantizer.group_size)
        ours = perplexity(loaded.model, self._windows, context.machine.device)
        if not math.isfinite(ours):
            raise UserError(f"the unquantized model has a perplexity of {ours}", key="model.source")
        directory = loaded.directory
        del loaded
        gc.collect()  # the worker needs the memory
        return directory, ours

    def _run(self, python: Path, folder: Path, source: Path, ours: float) -> dict[str, Any]:
        model, result = folder / "model", folder / "result"
        model.mkdir(parents=True)
        result.mkdir()
        _link_weights(source, model)
        config = self._config(source)
        old = self._quantizer.config_form == "transformers-4"
        _write_json(model / _CONFIG, transformers4_config(config) if old else config)
        self._write_tokens(folder / "tokens.safetensors")
        request = {
            "model": str(model), "result": str(result), "device": self._context.machine.device,
            "dtype": self._context.dtype, "options": dict(self._quantizer.options),
            "tokens": str(folder / "tokens.safetensors"), "response": str(folder / "response.json"),
        }  # fmt: skip
        _write_json(folder / "request.json", request)
        who = f"quantizer {self._quantizer.name!r} in the environment {self._quantizer.environment.name!r}"
        run_worker(python, self._quantizer.script, folder / "request.json", self._on_event(ours), who)
        response: dict[str, Any] = json.loads((folder / "response.json").read_text(encoding="utf-8"))
        return response

    def _on_event(self, ours: float) -> Any:
        def take(event: Mapping[str, Any]) -> None:
            if "perplexity" in event:
                self._events["there"] = event["perplexity"]
                _check_same(ours, event["perplexity"], self._quantizer)
            else:
                self._context.progress(f"{self._quantizer.name}: {event['phase']}", event["fraction"])

        return take

    def _config(self, source: Path) -> dict[str, Any]:
        given = dict(self._context.source.config)
        return given or json.loads((source / _CONFIG).read_text(encoding="utf-8"))

    def _write_tokens(self, path: Path) -> None:
        import torch

        tokens = {"samples": torch.tensor(self._data.samples), "windows": torch.tensor(self._windows)}
        save_file(tokens, path)

    def _compose(self, aside: Path, source: Path, quantization: Mapping[str, Any]) -> Path:
        """The library's tensors beside our own config and tokenizer."""
        checkpoint = aside / "checkpoint"
        os.rename(aside / "job" / "result", checkpoint)
        _write_json(checkpoint / _CONFIG, {**self._config(source), "quantization_config": dict(quantization)})
        for pattern in _BESIDE:
            for path in source.glob(pattern):
                shutil.copy(path, checkpoint / path.name)
        return checkpoint

    def _read_back(self, checkpoint: Path, ours: float) -> float:
        context = self._context
        context.progress(f"{self._quantizer.name}: read back", 0.0)
        loaded = load_model(
            _source(checkpoint, context), context.facts, dtype=context.dtype, device=context.machine.device,
            progress=context.progress, packed=True,
        )  # fmt: skip
        _reader(self._quantizer, context).apply(loaded.model, _reader_context(loaded, context))
        quantized = perplexity(loaded.model, self._windows, context.machine.device)
        check_quantized(ours, quantized, self._quantizer)
        return quantized

    def _write_facts(self, checkpoint: Path, figures: Mapping[str, Any], ours: float, quantized: float) -> None:
        environment = self._quantizer.environment
        gates = {
            "unquantized_perplexity": ours,
            "unquantized_perplexity_there": self._events["there"],
            "quantized_perplexity": quantized,
            "tokens": sum(len(window) - 1 for window in self._windows),
        }
        facts = {
            "method": self._quantizer.method,
            "environment": {"name": environment.name, "pins": [*environment.pins, *environment.no_deps]},
            **figures,
            "gates": gates,
            "calibration": {**self._data.facts, **msgspec.to_builtins(self._options.calibration)},
        }
        _write_json(checkpoint / _FACTS, facts)


def _check_same(ours: float, theirs: float, quantizer: IsolatedQuantizer) -> None:
    if not (math.isfinite(theirs) and abs(theirs / ours - 1) <= SAME_PERPLEXITY):
        raise WrongResult(
            f"the unquantized model has a perplexity of {theirs:.5g} in the environment "
            f"{quantizer.environment.name!r} and of {ours:.5g} here (they may differ by {SAME_PERPLEXITY:.1%}): its "
            "libraries read the checkpoint in another way"
        )


def check_quantized(ours: float, quantized: float, quantizer: IsolatedQuantizer) -> None:
    """Raises `WrongResult` for a checkpoint that is far worse than the unquantized model."""
    limit = quantizer.most_perplexity_ratio
    if not quantized <= limit * ours:
        raise WrongResult(
            f"the checkpoint that quantizer {quantizer.name!r} made has a perplexity of {quantized:.5g} when read "
            f"back, {quantized / ours:.3g} times the unquantized {ours:.5g} (most_perplexity_ratio {limit:g})"
        )


def _gate_windows(
    options: CalibratedOptions, context: EngineContext, data: CalibrationData, tokenizer: Tokenizer | None
) -> list[list[int]]:
    """The first tokens of the calibration corpus, which the samples usually leave out; whole windows only."""
    if tokenizer is None:
        return [list(sample) for sample in data.samples[:_GATE_WINDOWS]]
    text = read_corpus(options.calibration.corpus, context.base or Path()).text[:_GATE_CHARACTERS]
    ids: Sequence[int] = tokenizer.encode(text)
    length = min(_GATE_WINDOW_TOKENS, context.facts.max_position_embeddings, len(ids))
    starts = range(0, len(ids) - length + 1, length)[:_GATE_WINDOWS]
    return [list(ids[start : start + length]) for start in starts]


def _link_weights(source: Path, folder: Path) -> None:
    for path in (*checkpoint_files(source), *source.glob("*.safetensors.index.json")):
        os.symlink(path.resolve(), folder / path.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
