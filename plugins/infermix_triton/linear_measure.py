"""Which of two products is faster for how many rows: measured on the weights of the loaded model, in set-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from infermix_kernels.gemv_gated import gated_row
from infermix_kernels.launch import overlaps_launches
from torch import Tensor

from infermix_triton.fuse_find import random_rows
from infermix_triton.fused_operators import Activation, TritonOperators

if TYPE_CHECKING:
    from infermix_triton.linear_skinny import SkinnyLinear

#: Row counts that are measured; one between two of them is as fast as the larger one.
_MEASURED = (1, 2, 4, 8, 16)
#: Weights that are read between two reads of the same one, so that none comes from the cache.
_COLD_BYTES = 200 << 20
#: How much faster ours has to be: less than that is noise.
_MARGIN = 0.98
_ROUNDS = 5


def faster_rows(modules: Sequence[SkinnyLinear], max_rows: int) -> tuple[bool, ...]:
    """For each row count 0 ... `max_rows`, whether the kernel beats torch on these weights of one shape."""
    modules = _enough(modules)
    result = [False]
    for count in _MEASURED:
        if len(result) <= max_rows:
            x = random_rows(count, modules[0].in_features, modules[0].weight)
            ours, torchs = (_seconds(modules, partial(product, x)) for product in (_skinny, _torch))
            result += [ours < _MARGIN * torchs] * (min(count, max_rows) + 1 - len(result))
    return tuple(result)


def gating_pays(modules: Sequence[SkinnyLinear], kind: Activation) -> bool:
    """Whether one row's product and activation are faster in one launch than in two."""
    modules = _enough(modules)
    x = random_rows(1, modules[0].in_features, modules[0].weight)
    gate = TritonOperators(overlaps_launches(x.device)).gate
    once = _seconds(modules, lambda module: gated_row(x, module.weight, kind, pdl=overlaps_launches(x.device)))
    twice = _seconds(modules, lambda module: gate(module(x), kind))
    return once < twice


def _skinny(x: Tensor, module: SkinnyLinear) -> Tensor:
    return module.skinny(x)


def _torch(x: Tensor, module: SkinnyLinear) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def _enough(modules: Sequence[SkinnyLinear]) -> Sequence[SkinnyLinear]:
    """The first weights that do not fit into the cache together; a few times all of them where all of them do."""
    size = modules[0].weight.numel() * modules[0].weight.element_size()
    wanted = min(-(-_COLD_BYTES // size), 64)
    return (list(modules) * wanted)[: max(wanted, 1)] if len(modules) < wanted else modules[:wanted]


def _seconds(modules: Sequence[SkinnyLinear], product: Callable[[SkinnyLinear], Tensor]) -> float:
    """The fastest of a few replays of all products in one CUDA graph."""
    graph = _captured(lambda: [product(module) for module in modules])
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        work()
    return graph
