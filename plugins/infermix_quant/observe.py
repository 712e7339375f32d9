"""What the linears of a decoder layer are fed with: Gram matrices, magnitudes, and who shares an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from infermix.errors import UserError
from infermix.toolkit.layerwise import CalibrationLayer
from infermix.toolkit.linears import FoundLinear
from torch import Tensor, nn

from infermix_quant.observers import Magnitudes


@dataclass
class InputGroup:
    """Linears that multiply the same tensor x. Statistics are over all rows of all samples, fp32.

    `gram [K, K]` is the sum of x^T x; `mean_abs`, `max_abs` `[K]`; `magnitudes` is a histogram over all of x;
    `rows [R, K]` are rows of x themselves, as many of every sample, drawn at random.
    `producer` is the module whose output x is, such as a norm, as a dotted name inside the layer (`None`: x is
    computed from several).
    """

    linears: list[FoundLinear]
    producer: str | None
    gram: Tensor | None = None
    sum_abs: Tensor | None = None
    max_abs: Tensor | None = None
    num_rows: int = 0
    consumers: list[str] = field(default_factory=list)
    magnitudes: Magnitudes | None = None
    rows: Tensor | None = None

    @property
    def mean_abs(self) -> Tensor:
        assert self.sum_abs is not None
        return self.sum_abs / self.num_rows

    def divide(self, scale: Tensor) -> None:
        """The statistics of x / `scale [K]`."""
        if self.gram is not None:
            self.gram = self.gram / scale / scale[:, None]
        self.sum_abs = None if self.sum_abs is None else self.sum_abs / scale
        self.max_abs = None if self.max_abs is None else self.max_abs / scale
        self.rows = None if self.rows is None else self.rows / scale

    def add(self, x: Tensor, want_gram: bool, num_kept: int = 0) -> None:
        """One sample's x; `num_kept` of its rows stay."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if not rows.shape[0]:  # an expert that no token of the sample chose
            return
        magnitude = rows.abs()
        self.num_rows += rows.shape[0]
        peak = magnitude.amax(dim=0)
        self.sum_abs = magnitude.sum(0) if self.sum_abs is None else self.sum_abs.add_(magnitude.sum(0))
        self.max_abs = peak if self.max_abs is None else torch.maximum(self.max_abs, peak)
        if self.magnitudes is not None:
            self.magnitudes.add(rows)
        if want_gram:
            self.gram = rows.t() @ rows if self.gram is None else self.gram.addmm_(rows.t(), rows)
        if num_kept:
            self._keep(rows, num_kept)

    def _keep(self, rows: Tensor, number: int) -> None:
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.num_rows))[:number]
        kept = rows[drawn.to(rows.device)]
        self.rows = kept if self.rows is None else torch.cat([self.rows, kept])


def observe(
    layer: CalibrationLayer,
    linears: Sequence[FoundLinear],
    *,
    gram: bool,
    magnitudes: bool = False,
    rows: int = 0,
) -> list[InputGroup]:
    """Run all samples through the layer; the groups come in the order in which they are reached.

    `magnitudes` asks for the histogram that static scales are chosen from, `rows` for about so many rows of x.

    Raises `UserError` naming a linear that no sample reaches, or whose inputs are not finite.
    """
    groups, missing = _reached_groups(layer, linears)
    if missing:
        raise UserError(
            f"no calibration sample reaches {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
            key="parts.quantizer",
            hint=f"add samples, or leave it out: skip: ['{missing[0]}']",
        )
    for group in groups:
        group.magnitudes = Magnitudes() if magnitudes else None
    num_kept = -(-rows // layer.num_samples)
    hooks = [_hook(group.linears[0].module, _adder(group, gram, num_kept)) for group in groups]
    with removed(hooks):
        layer.run()
    for group in groups:
        _require_finite(group)
    return groups


def _adder(group: InputGroup, gram: bool, num_kept: int) -> Callable[[Tensor], None]:
    return lambda x: group.add(x, gram, num_kept)


def _hook(module: nn.Module, see: Callable[[Tensor], None]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(args[0] if args else next(iter(kwargs.values())))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def removed(hooks: Sequence[Any]) -> Iterator[None]:
    """The hooks are gone afterwards."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _reached_groups(layer: CalibrationLayer, linears: Sequence[FoundLinear]) -> tuple[list[InputGroup], list[str]]:
    """Groups, and the linears that no sample reaches. An expert that the first one does not reach, others may."""
    groups: list[InputGroup] = []
    left = list(linears)
    for sample in range(layer.num_samples):
        groups += _groups_of_sample(layer, left, sample)
        reached = {linear.name for group in groups for linear in group.linears}
        left = [linear for linear in left if linear.name not in reached]
        if not left:
            break
    return groups, [linear.name for linear in left]


def _groups_of_sample(layer: CalibrationLayer, linears: Sequence[FoundLinear], sample: int) -> list[InputGroup]:
    """Which linears get one and the same tensor object, and whose output that object is."""
    groups: dict[int, InputGroup] = {}
    made: dict[int, str] = {}
    alive: list[Tensor] = []  # an id means something only as long as its object lives
    by_module = {linear.module: linear for linear in linears}

    def before(name: str, module: nn.Module) -> Callable[[Tensor], None]:
        def see(x: Tensor) -> None:
            if not x.numel():
                return
            alive.append(x)
            group = groups.setdefault(id(x), InputGroup([], made.get(id(x))))
            group.consumers.append(name)
            if module in by_module and by_module[module] not in group.linears:
                group.linears.append(by_module[module])

        return see

    def after(name: str) -> Callable[..., None]:
        def see(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                alive.append(output)
                made[id(output)] = name

        return see

    leaves = [(name, module) for name, module in layer.module.named_modules() if not any(module.children())]
    hooks = [module.register_forward_hook(after(name)) for name, module in leaves]
    hooks += [_hook(module, before(name, module)) for name, module in leaves]
    with removed(hooks):
        layer.output(sample)
    return [group for group in groups.values() if group.linears]


def _require_finite(group: InputGroup) -> None:
    assert group.max_abs is not None
    if not bool(group.max_abs.isfinite().all()):
        raise UserError(
            f"the inputs of {group.linears[0].name} are not finite on the calibration samples",
            key="parts.quantizer.calibration",
            hint="the weights before it, or the dtype, are at fault",
        )
