"""The experiment, as typed data. `spec.load` makes it from YAML, `spec.sweep` makes cells of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

DEFAULT_PARTS = {
    "attention": "sdpa",
    "kv": "paged",
    "quantizer": "none",
    "decoder": "autoregressive",
    "scheduler": "continuous",
}
DEFAULT_ENGINE = "native"

#: What quality is compared with: the yardstick of every other part.
REFERENCE_ENGINE = "native"
REFERENCE_PARTS = {
    "attention": "eager",
    "kv": "dense",
    "quantizer": "none",
    "decoder": "autoregressive",
    "scheduler": "continuous",
}


class Use(msgspec.Struct, frozen=True):
    """A component by name with its options as written (validated against the component by `compose`)."""

    name: str
    options: dict[str, Any] = {}


class ModelSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the weights come from.

    `source`: `package:NAME`, a Hugging Face id, a directory with safetensors, a `.gguf` file, or (with
    `weights: dummy`) a `config.json` or a directory that holds one. `config`: overrides of single config values.
    """

    source: str
    weights: Annotated[str, Meta(pattern="^(real|dummy)$", description="dummy: random, speed only")] = "real"
    revision: str | None = None
    trust_remote_code: bool = False
    config: dict[str, Any] = {}


class Measure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long and how often to measure."""

    repeats: Annotated[int, Meta(ge=1, description="measured repeats of the workload")] = 3
    warmup: Annotated[int, Meta(ge=0, description="unmeasured repeats before; more are added until steady")] = 1
    max_warmup: Annotated[int, Meta(ge=0, description="most unmeasured repeats while waiting for a steady rate")] = 3
    time_limit_s: Annotated[
        float, Meta(gt=0, description="wall clock for one cell, set-up included", extra={"unit": "s"})
    ] = 600.0
    goodput: dict[str, Annotated[float, Meta(gt=0)]] = {}
    gates: dict[str, Annotated[float, Meta(ge=0)]] = {}
    guards: dict[str, Annotated[float, Meta(ge=0)]] = {}
    interleave: bool = False


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the engine and of the sweep."""

    max_cells: Annotated[int, Meta(ge=1)] = 1000
    kv_memory_bytes: Annotated[int, Meta(ge=1, extra={"unit": "bytes"})] | None = None
    kv_memory_fraction: Annotated[float, Meta(gt=0, le=1)] | None = None
    kv_swap_bytes: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="host memory (pinned on CUDA) that preempted sequences are swapped out to; shared by all "
                "replicas",
                extra={"unit": "bytes"},
            ),
        ]
        | None
    ) = None
    max_model_len: Annotated[int, Meta(ge=1, extra={"unit": "tokens"})] | None = None
    num_threads: Annotated[int, Meta(ge=1, description="CPU threads of the cell")] | None = None


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """One resolved experiment: a single cell once `sweep` is empty.

    `parts` holds the roles that the experiment names; `compose` adds `DEFAULT_PARTS` for those that the engine hosts
    and nobody named. `transforms` change the loaded model, in this order. `dtype` `auto`: the checkpoint's, except
    that GGUF weights become float32 on the CPU and bfloat16 on CUDA, as float32 checkpoints do there. `baseline` is a
    partial assignment (dotted path -> value) that picks the row which others are divided by. `base` is the folder of
    the YAML file.
    """

    name: str
    model: ModelSource
    workload: Use
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    engine: Use = Use(DEFAULT_ENGINE)
    parts: dict[str, Use] = {}
    transforms: tuple[Use, ...] = ()
    measure: Measure = Measure()
    limits: Limits = Limits()
    quality: tuple[Use, ...] = ()
    seed: int = 0
    baseline: dict[str, Any] = {}
    base: str = "."


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep. `overrides` are the swept paths and values; `digest` identifies the resolved experiment.

    `name` is short and unique inside the experiment, e.g. `attention=sdpa,kv=paged`; `baseline` marks the row that
    others are divided by. `data` is the sha256 of every file that an option names, by the option's path.
    """

    index: int
    name: str
    experiment: Experiment
    overrides: dict[str, Any] = {}
    digest: str = ""
    baseline: bool = False
    data: dict[str, str] = {}
