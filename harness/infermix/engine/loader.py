"""Weights and tokenizer of a resolved source, on the device, in the dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infermix.cost.masked_diffusion import weight_names
from infermix.cost.safetensors_header import checkpoint_files, read_safetensors_header
from infermix.cost.source import fetch_weights
from infermix.engine.hf_cache import converted_gguf, without_progress_bars
from infermix.engine.tokenizer import HfTokenizer, as_ids, read_tokenizer
from infermix.errors import OutOfMemory, UserError
from infermix.roles.families import is_causal

if TYPE_CHECKING:
    from torch import nn

    from infermix.roles.facts import ModelFacts, ResolvedSource

#: Tensors beside which a checkpoint holds no plain `weight`, or one of 8 bits.
_PACKED = (".qweight", ".weight_packed", ".weight_scale")

Progress = Callable[[str, float], None]


def _silent(phase: str, fraction: float) -> None:
    """No progress wanted."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in eval mode; `notes` are findings of the load that a record should show.

    `directory` holds its files, `None` for dummy weights; `file` is the GGUF file that they were converted from.
    """

    model: nn.Module
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()
    directory: Path | None = None
    file: Path | None = None


def load_tokenizer(source: ResolvedSource, progress: Progress = _silent) -> HfTokenizer | None:
    """The source's tokenizer; `None` when it has none. Raises `UserError` for a broken one."""
    if source.kind == "gguf":
        return read_tokenizer(_gguf_directory(source, progress), source.label, False)
    return read_tokenizer(source.directory, source.label, source.trust_remote_code)


def load_model(
    source: ResolvedSource,
    facts: ModelFacts,
    *,
    dtype: str,
    device: str,
    load_arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress = _silent,
    packed: bool = False,
) -> LoadedModel:
    """Load (or, for dummy weights, draw) the model.

    `load_arguments` go to `from_pretrained` as they are (load-time quantizers). With `packed`, matrices that the
    files hold in packed form are left for a quantizer to read (their values are undefined until then). Raises
    `UserError` for files that are missing, truncated or do not fit the architecture, `OutOfMemory` when the device is
    too small.
    """
    torch_dtype = getattr(torch, dtype)
    try:
        if source.kind == "dummy":
            return _draw(source, torch_dtype, torch.device(device), seed)
        source = fetch_weights(source)
        directory = _gguf_directory(source, progress) if source.kind == "gguf" else source.directory
        loaded = _read(source, directory, torch_dtype, torch.device(device), load_arguments or {}, packed)
        return replace(loaded, file=source.file)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{source.label} in {dtype} does not fit on {device}: {error}") from error


def _gguf_directory(source: ResolvedSource, progress: Progress) -> Path:
    assert source.file is not None
    return converted_gguf(source.file, progress)


def _draw(source: ResolvedSource, dtype: torch.dtype, device: torch.device, seed: int) -> LoadedModel:
    """Random weights by the architecture's own initialisation, made on the device."""
    from transformers import AutoModelForCausalLM

    config = _config(source, source.directory)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=source.trust_remote_code
        )
    return LoadedModel(_ready(model), as_ids(config.get_text_config().eos_token_id))


def _read(
    source: ResolvedSource,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    load_arguments: Mapping[str, Any],
    packed: bool,
) -> LoadedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    files = checkpoint_files(directory)
    if not files:
        raise UserError("holds no .safetensors file", where=str(directory), hint=_pickled_hint(directory))
    read_safetensors_header(files)
    config = _config(source, directory)
    if packed and hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would hand it to libraries that it does not come with
    renamed = weight_names(source.config)
    try:
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation="eager",
                trust_remote_code=source.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **({"key_mapping": renamed} if renamed else {}),
                **load_arguments,
            )
    except (SafetensorError, OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot be loaded: {error}", where=str(directory)) from error
    model, found = loaded
    notes = _check_complete(directory, _without_packed(found) if packed else found)
    if model.device.type != device.type or device.index not in (None, model.device.index):
        model = model.to(device)
    return LoadedModel(_ready(model), _eos_ids(model, source), notes, directory)


def _ready(model: Any) -> Any:
    """For inference. Without a mask, transformers' SDPA asks the modules for the direction, not the config."""
    if not is_causal(model.config.get_text_config(decoder=True).to_dict()):
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    return model.eval().requires_grad_(False)


def _config(source: ResolvedSource, directory: Path) -> Any:
    """The config with the experiment's overrides. Raises `UserError` when transformers does not know it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        if not source.config:
            return AutoConfig.from_pretrained(directory, trust_remote_code=source.trust_remote_code)
        if source.trust_remote_code and "auto_map" in source.config:
            overrides = {key: value for key, value in source.config.items() if key not in ("auto_map", "model_type")}
            return AutoConfig.from_pretrained(directory, trust_remote_code=True, **overrides)
        return CONFIG_MAPPING[source.config["model_type"]].from_dict(dict(source.config))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a config that transformers understands: {error}", where=str(directory)) from error


def _without_packed(found: Any) -> dict[str, Any]:
    """Findings about other tensors than those of packed matrices."""
    stems = {name.rpartition(".")[0] for name in found["unexpected_keys"] if name.endswith(_PACKED)}

    def others(names: Any) -> list[Any]:
        return [
            each for each in names if (each if isinstance(each, str) else each[0]).rpartition(".")[0] not in stems
        ]

    return {kind: others(found[kind]) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")}


def _check_complete(directory: Path, found: Any) -> tuple[str, ...]:
    """transformers draws missing weights at random and goes on; here that is an error."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise UserError(
            f"{len(missing)} weights of the architecture are not in the files: {_first(missing)}",
            where=str(directory),
            hint="the config belongs to another checkpoint, or a file is missing",
        )
    if found["mismatched_keys"]:
        names = sorted(str(entry[0]) for entry in found["mismatched_keys"])
        raise UserError(f"weights have other shapes than config.json says: {_first(names)}", where=str(directory))
    unused = sorted(found["unexpected_keys"])
    return (f"{len(unused)} tensors of the files are not used: {_first(unused)}",) if unused else ()


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _pickled_hint(directory: Path) -> str | None:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    return f"{pickled[0]} is a pickle, which is not loaded: convert it to safetensors" if pickled else None


def _eos_ids(model: Any, source: ResolvedSource) -> tuple[int, ...]:
    """Every id that ends a text: generation config, config, then tokenizer."""
    generation = getattr(model, "generation_config", None)
    candidates = (
        as_ids(getattr(generation, "eos_token_id", None)),
        as_ids(model.config.get_text_config().eos_token_id),
        getattr(load_tokenizer(source), "eos_token_ids", ()),
    )
    return tuple(dict.fromkeys(token for ids in candidates for token in ids))
