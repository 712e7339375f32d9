"""Scaling the input channels of linears, with the inverse folded into the operator before them.

Which operator that is, is found by structure (a norm whose output the linears read) and then proved: the layer must
compute the same with scales folded in. What fails the proof is put back and reported as not folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from infermix.toolkit.layerwise import CalibrationLayer
from torch import Tensor, nn

from infermix_quant.observe import InputGroup, removed

#: Relative to a consumer's output. The scales of the proof are powers of two, which hardly round.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
#: By how much softmax and the like may amplify that in the outputs of blocks. A wrong fold changes them by half.
_AMPLIFIED = 10
#: (value-like, reader): linears by their last name, where the second reads channels of the first, scaled by the rest.
_PAIRS = {"o_proj": "v_proj", "out_proj": "v_proj", "down_proj": "up_proj"}


@dataclass
class Fold:
    """A place that divides the input of `consumers` by channel: rows of `weight` and `bias` belong to channels.

    `offset` 1 stands for a norm that multiplies by 1 + weight (Gemma).
    """

    source: nn.Module
    consumers: list[nn.Module]
    offset: float = 0.0

    def apply(self, scale: Tensor) -> None:
        """Divide the source's output by `scale [K]`, multiply the consumers' columns by it."""
        for name, offset in (("weight", self.offset), ("bias", 0.0)):
            parameter = getattr(self.source, name, None)
            if parameter is not None:
                shape = (-1, *[1] * (parameter.dim() - 1))
                changed = (parameter.data.float() + offset) / scale.view(shape) - offset
                parameter.data.copy_(changed)
        for consumer in self.consumers:
            columns = scale.view(-1, 1) if _transposed(consumer) else scale
            weight: Tensor = consumer.weight  # type: ignore[assignment]
            weight.data.copy_(weight.data.float() * columns)


def _transposed(module: nn.Module) -> bool:
    """GPT-2's `Conv1D` keeps its weight as `[in, out]`."""
    return type(module).__name__ == "Conv1D"


def find_fold(layer: CalibrationLayer, group: InputGroup, *, norms_only: bool = False) -> Fold | None:
    """Where the scales of the group's input can go; `None` when nothing passes the proof."""
    modules = dict(layer.module.named_modules())
    consumers = [modules[name] for name in group.consumers]
    if not all(_is_linear(consumer) for consumer in consumers):
        return None
    if group.producer is not None:
        candidates = _norm_folds(modules[group.producer], consumers, group)
    else:
        candidates = iter(()) if norms_only else _pair_folds(modules, group, consumers)
    return next((fold for fold in candidates if _proved(layer, fold, group)), None)


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


def _norm_folds(norm: nn.Module, consumers: list[nn.Module], group: InputGroup) -> Iterator[Fold]:
    weight = getattr(norm, "weight", None)
    if isinstance(weight, Tensor) and weight.shape == (group.linears[0].in_features,):
        yield Fold(norm, consumers)
        yield Fold(norm, consumers, offset=1.0)


def _pair_folds(modules: Mapping[str, nn.Module], group: InputGroup, consumers: list[nn.Module]) -> Iterator[Fold]:
    """`up_proj` before `down_proj`, and `v_proj` before `o_proj` where every value head is read once."""
    name = group.consumers[0]
    prefix, _, last = name.rpartition(".")
    source = modules.get(".".join(filter(None, (prefix, _PAIRS.get(last, "")))))
    if source is None or not _is_linear(source) or _transposed(source):
        return
    weight: Any = source.weight
    if weight.shape[0] == group.linears[0].in_features:
        yield Fold(source, consumers)


def _proved(layer: CalibrationLayer, fold: Fold, group: InputGroup) -> bool:
    """Whether the layer computes the same with arbitrary scales folded in; leaves everything as it was.

    What counts are the consumers' outputs, those of the blocks that they belong to, and what the layer adds: the sum
    with a large residual, as Gemma's, would hide a wrong fold.
    """
    weight = group.linears[0].weight
    draw = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randint(-1, 2, (weight.shape[1],), generator=draw).float()).to(weight.device)
    sample, before = _reached(layer, group.consumers)
    with restored([fold.source, *fold.consumers]):
        fold.apply(scale)
        after = _outputs(layer, group.consumers, sample)
    tolerance = _TOLERANCES[weight.dtype]
    rounding = torch.finfo(weight.dtype).eps * float(layer.output(sample).double().norm())
    return all(
        _difference(after[name], value)
        <= (tolerance if name in group.consumers else _AMPLIFIED * tolerance) * float(value.norm())
        + (0 if name else rounding)
        for name, value in before.items()
    )


def _reached(layer: CalibrationLayer, consumers: Sequence[str]) -> tuple[int, dict[str, Tensor]]:
    """The first sample that reaches all consumers (experts are not always), with its outputs."""
    for sample in range(layer.num_samples):
        found = _outputs(layer, consumers, sample)
        if all(name in found for name in consumers):
            break
    return sample, found


def _outputs(layer: CalibrationLayer, consumers: Sequence[str], sample: int) -> dict[str, Tensor]:
    """By name, fp64, of what was reached: consumers, the blocks around them, and as `""` what the layer adds."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def see(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.numel():
                seen[name] = first.double()

        return see

    around = [name for name, _ in layer.module.named_modules() if any(_within(each, name) for each in consumers)]
    hooks = [layer.module.get_submodule(name).register_forward_hook(keep(name)) for name in around]
    with removed(hooks):
        output = layer.output(sample)
    return {**seen, "": output.double() - layer.input(sample).double()}


def _within(name: str, block: str) -> bool:
    return bool(block) and f"{name}.".startswith(f"{block}.")


def _difference(after: Tensor, before: Tensor) -> float:
    return float((after - before).norm()) if after.shape == before.shape else float("inf")


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters of these modules have their values back afterwards."""
    kept = [(parameter, parameter.detach().clone()) for module in modules for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, value in kept:
            parameter.data.copy_(value)


def fits(fold: Fold, scale: Tensor) -> bool:
    """Whether the dtype holds what the scales make of the parameters: those of fp16 end at 65,504."""
    modules = [fold.source, *fold.consumers]
    with restored(modules):
        fold.apply(scale)
        return all(bool(each.isfinite().all()) for module in modules for each in module.parameters())


def fold_each(
    layer: CalibrationLayer,
    groups: Sequence[InputGroup],
    scale_of: Callable[[InputGroup, Fold], Tensor | None],
    *,
    norms_only: bool = False,
) -> tuple[int, int]:
    """Fold `scale_of(group, fold)` `[K]` for every group that has a place for it; returns (folded, groups).

    Scales that make a parameter too large for its dtype are not folded.

    The statistics of a folded group are those of its new input.
    """
    folded = 0
    for group in groups:
        fold = find_fold(layer, group, norms_only=norms_only)
        scale = None if fold is None else scale_of(group, fold)
        if fold is None or scale is None or not fits(fold, scale):
            continue
        fold.apply(scale)
        group.divide(scale)
        folded += 1
    return folded, len(groups)
