"""Hook specifications: one per role. Called once at start-up, never in the hot path.

A plugin implements any of them with `@hookimpl` and returns a list of `Component`. What `build(options, context)`
receives and returns:

| hook | context | returns |
|---|---|---|
| `infermix_attention` | `None` | `roles.attention.AttentionBackend` |
| `infermix_kv` | `None` | `roles.kv_space.KVLayout` (torch only inside `store`) |
| `infermix_quantizer` | `None` | `roles.quantizer.Quantizer` |
| `infermix_decoder` | `roles.decoder.DecoderContext` | `roles.decoder.Decoder` |
| `infermix_scheduler` | `max_num_seqs` (int) | `roles.scheduler.Scheduler` |
| `infermix_transform` | `None` | `roles.transform.ModelTransform` |
| `infermix_engine` | `roles.engine.EngineContext` | `roles.engine.Engine` |
| `infermix_workload` | `roles.workload.WorkloadContext` | `roles.workload.Workload` |
| `infermix_evaluator` | `roles.evaluator.EvaluatorContext` | `roles.evaluator.Evaluator` |
"""

# A specification has no body.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import pluggy

from infermix.roles.component import Component

PROJECT = "infermix"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def infermix_attention() -> list[Component]:
    """Attention backends."""


@hookspec
def infermix_kv() -> list[Component]:
    """KV layouts."""


@hookspec
def infermix_quantizer() -> list[Component]:
    """Quantizers."""


@hookspec
def infermix_decoder() -> list[Component]:
    """Decoding strategies."""


@hookspec
def infermix_scheduler() -> list[Component]:
    """Schedulers."""


@hookspec
def infermix_transform() -> list[Component]:
    """Model transforms: fused modules, compilation."""


@hookspec
def infermix_engine() -> list[Component]:
    """Engines: the native one, and whole engines that cannot be taken apart."""


@hookspec
def infermix_workload() -> list[Component]:
    """Workloads."""


@hookspec
def infermix_evaluator() -> list[Component]:
    """Quality evaluators."""
