"""Runs inside an environment of its own: `python -I isolated_worker.py SCRIPT REQUEST`. Imports nothing of InferMix.

REQUEST is a JSON file; tensors come and go as safetensors. SCRIPT is a plugin's file with

    LIBRARIES = ("...",)                    # packages whose versions are told
    def quantize(job, model) -> dict: ...

`quantize` quantizes the loaded `model`, hands the tensors of a standard checkpoint to `job.save`, and returns the
`quantization_config` for its `config.json`. SCRIPT may also have `load(job)`, which returns the unquantized model.
Events go to the parent as JSON lines; whatever anything prints goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Job:
    """`samples` are token-id lists for calibration, `options` the method's, `dtype` a torch dtype's name."""

    model: Path
    result: Path
    device: str
    dtype: str
    options: dict[str, Any]
    samples: list[list[int]]
    sink: BinaryIO | None = None

    def progress(self, phase: str, fraction: float) -> None:
        self.send({"phase": phase, "fraction": fraction})

    def save(self, tensors: dict[str, Any]) -> None:
        """Write the checkpoint's tensors; of those that share memory the first, since tied ones are tied again."""
        from safetensors.torch import save_file

        kept: dict[str, Any] = {}
        seen: set[int] = set()
        for name, tensor in tensors.items():
            if tensor.numel() == 0 or tensor.data_ptr() not in seen:
                kept[name] = tensor.detach().cpu().contiguous()
            seen.add(tensor.data_ptr())
        save_file(kept, self.result / "model.safetensors", metadata={"format": "pt"})

    def send(self, event: dict[str, Any]) -> None:
        if self.sink is not None:
            self.sink.write(json.dumps(event).encode() + b"\n")
            self.sink.flush()


def perplexity(model: Any, windows: Iterable[list[int]], device: str) -> float:
    """exp of the mean negative log-likelihood of every token of every window but its first; plain full forwards."""
    import torch

    nats, count = 0.0, 0
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += len(window) - 1
    mean = nats / count
    return math.exp(mean) if mean < 700 else math.inf


def load(job: Job) -> Any:
    """The checkpoint through the environment's transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, job.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, torch_dtype=dtype, attn_implementation="eager", local_files_only=True, use_safetensors=True
    )
    return model.to(torch.device(job.device)).eval()


def run(script: Any, job: Job, windows: list[list[int]]) -> dict[str, Any]:
    """The response: what the library answered, and what was measured."""
    job.progress("load", 0.0)
    model = getattr(script, "load", load)(job)
    job.send({"perplexity": perplexity(model, windows, job.device)})
    job.progress("quantize", 0.0)
    started = time.perf_counter()
    config = script.quantize(job, model)
    seconds = time.perf_counter() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", *script.LIBRARIES)}
    return {
        "quantization_config": config,
        "figures": {"quantize_s": seconds, "peak_host_bytes": peak_bytes, "versions": versions},
    }


def _import_script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("infermix_isolated_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _open_sink() -> BinaryIO:
    """The pipe to the parent, on a descriptor that no library knows; prints go to stderr."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sink


def _die_with_parent() -> None:
    """Nobody reads a result any more when the pipe from the parent closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    sink = _open_sink()
    _die_with_parent()
    script_path, request_path = sys.argv[1:]
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    from safetensors.torch import load_file

    tokens = load_file(request["tokens"])
    job = Job(
        model=Path(request["model"]), result=Path(request["result"]), device=request["device"],
        dtype=request["dtype"], options=request["options"], samples=tokens["samples"].tolist(), sink=sink,
    )  # fmt: skip
    response = run(_import_script(script_path), job, tokens["windows"].tolist())
    Path(request["response"]).write_text(json.dumps(response), encoding="utf-8")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips interpreter teardown, in which threads of libraries may hang.
    os._exit(code)
