"""Transform `compile`: torch.compile of every decoder layer and of the final norm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import Unsupported
from infermix.roles.transform import Stage, TransformContext, TransformReport
from torch import nn

if TYPE_CHECKING:
    from infermix_reference.plugin import CompileOptions

#: Most versions of one frame: one for a single token and one for more, per kind of layer, with room to spare. Without
#: `dynamic` every number of tokens is a version.
_MAX_VERSIONS = 64
_MAX_VERSIONS_STATIC = 1024


class CompileTransform:
    """Layers share their code, so a deep model compiles as fast as a shallow one.

    Attention and KV store are not traced: each layer's graph breaks around them. Compilation happens at the first
    call of each shape class, in the self-check, the warm-up and the capture of the engine's set-up. A layer that
    cannot be compiled raises, and so does one that would be compiled more often than the limit: torch would go on
    uncompiled without a word.
    """

    stage: Stage = "after_quantizer"

    def __init__(self, options: CompileOptions) -> None:
        self._options = options

    def apply(self, model: nn.Module, context: TransformContext) -> TransformReport:
        if self._options.backend == "inductor" and context.device == "cpu":
            require_compiler()
        layers = decoder_layers(model, len(context.facts.layers))
        norms = [module for module in siblings(model, layers) if is_norm(module)]
        self._forbid_giving_up()
        for module in (*layers, *norms):
            module.compile(**self._arguments())
        kept = {"embedding, rotary angles, head": "outside the decoder layers"}
        return TransformReport(
            name="compile",
            replaced={"decoder layer": len(layers), **({"final norm": len(norms)} if norms else {})},
            kept={**kept, **({} if norms else {"final norm": "no norm beside the layers"})},
            notes=("compiled at the first call; the engine's self-check compares the logits",),
        )

    def _arguments(self) -> dict[str, Any]:
        options = self._options
        mode = {"mode": options.mode} if options.backend == "inductor" else {}
        return {"backend": options.backend, "dynamic": options.dynamic, **mode}

    def _forbid_giving_up(self) -> None:
        """Process-wide settings of torch; a cell has a process of its own."""
        config: Any = torch._dynamo.config
        limit = _MAX_VERSIONS if self._options.dynamic else _MAX_VERSIONS_STATIC
        config.fail_on_recompile_limit_hit = True
        config.recompile_limit = max(config.recompile_limit, limit)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * limit)


def require_compiler() -> None:
    """Raises `Unsupported` when inductor would not find the C++ compiler that it needs on a CPU."""
    import torch._inductor.config

    known = [name for name in torch._inductor.config.cpp.cxx if name]
    if not any(shutil.which(name) for name in known):
        raise Unsupported(
            f"compile with backend inductor needs a C++ compiler on a CPU, none of {', '.join(known)} is installed"
        )


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The outermost list of as many modules as the model has layers. Raises `Unsupported` when there is none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise Unsupported(f"{type(model).__name__} has no list of {num_layers} layers that could be compiled")


def siblings(model: nn.Module, layers: nn.ModuleList) -> Iterator[nn.Module]:
    """The other modules of the body that holds `layers`."""
    for parent in model.modules():
        if any(child is layers for child in parent.children()):
            yield from (child for child in parent.children() if child is not layers)


def is_norm(module: nn.Module) -> bool:
    """A module without children whose parameters are vectors, and that has some."""
    parameters = list(module.parameters())
    return not list(module.children()) and bool(parameters) and all(each.dim() == 1 for each in parameters)
