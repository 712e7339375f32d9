"""Quantizers that scale channels and fold the inverse into what comes before: `awq` and `smoothquant`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.layerwise import CalibrationLayer, walk_layers
from infermix.toolkit.linears import FoundLinear, finite_linears, replace_module
from torch import Tensor, nn

from infermix_quant import common
from infermix_quant.awq import AwqSettings, clip_and_round, search_scale
from infermix_quant.cache import cached
from infermix_quant.folding import Fold, fits, fold_each
from infermix_quant.gptq import output_error
from infermix_quant.linear_grouped import QuantLinear
from infermix_quant.linear_int8 import INT8_MAX, Int8Linear, int8_weight
from infermix_quant.observe import InputGroup, observe
from infermix_quant.options import AwqOptions, SmoothQuantOptions
from infermix_quant.smooth import SEARCH_ROWS, Smoothed, search_alpha, smooth_scale
from infermix_quant.smooth_fit import FIT_ROWS, Fitted, fit_scale
from infermix_quant.static_scales import described_activations, peaks_of, round_int8_at, static_scale


class FoldedQuantizer:
    """Layer by layer: observe, fold scales where the structure allows it, convert the linears."""

    name = method = ""
    gram = norms_only = False
    #: Rows of every input that `scale` wants to see.
    num_rows = 0
    precision_bits: float | None = None

    def __init__(self, options: AwqOptions | SmoothQuantOptions) -> None:
        self.options, self._skip = options, options.skip
        self._errors: list[float] = []

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError`, with the model unchanged, when an option fits not every linear."""
        done = cached(model, context, self.name, self.options, self.form(), lambda: self._apply(model, context))
        return common.on_device(model, context, done)

    def _apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        found, skipped = finite_linears(model, self._skip)
        self.check(common.inside_layers(model, found))
        made: dict[str, QuantLinear] = {}
        folded = total = 0
        for layer in walk_layers(model, common.samples_of(context, self.name), context.progress):
            inside = [linear for linear in found if linear.name.startswith(f"{layer.name}.")]
            groups = observe(layer, inside, gram=self.gram, rows=self.num_rows)
            done, of = fold_each(layer, groups, self.scale, norms_only=self.norms_only)
            self.folded(layer, inside)
            folded, total = folded + done, total + of
            for name, linear in self._convert(groups):
                made[name] = linear
                replace_module(model, name, linear)
            found = [linear for linear in found if linear.name not in made]  # frees the old weights of this layer
        outside = tuple(linear.name for linear in found)
        errors = {"mean_output_error": fmean(self._errors)} if self._errors else {}
        details = {"folded_inputs": folded, "inputs": total, **errors, **self.chosen()}
        return common.report(self.method, made, (*skipped, *outside), details, self.precision_bits)

    def _convert(self, groups: Sequence[InputGroup]) -> Iterator[tuple[str, QuantLinear]]:
        with torch.no_grad():
            for group in groups:
                for linear in group.linears:
                    yield linear.name, self.make(linear, group)

    def form(self) -> str:
        """The format of the checkpoint that is kept."""
        return ""

    def chosen(self) -> Mapping[str, Any]:
        """What a search found, for the record."""
        return {}

    def check(self, found: Sequence[FoundLinear]) -> None:
        """Raises `UserError` before anything is converted."""

    def folded(self, layer: CalibrationLayer, linears: Sequence[FoundLinear]) -> None:
        """Scales of this layer are folded, its linears not yet converted."""

    def scale(self, group: InputGroup, fold: Fold) -> Tensor | None:
        """Factors `[K]` of the weights' columns; `None` to leave the group alone."""
        raise NotImplementedError

    def make(self, linear: FoundLinear, group: InputGroup) -> QuantLinear:
        raise NotImplementedError


class AwqQuantizer(FoldedQuantizer):
    name, gram = "awq", True

    def __init__(self, options: AwqOptions) -> None:
        super().__init__(options)
        self._options = options
        sizes = common.described(options.bits, options.bits_for, options.group_size, options.symmetric)
        self.method = f"awq {sizes}{'' if options.clip else ', not clipped'}"

    def form(self) -> str:
        """AWQ's own, which holds 4 bits; GPTQ's for the rest."""
        return "awq" if self._options.bits == 4 and not self._options.bits_for else "gptq"

    def check(self, found: Sequence[FoundLinear]) -> None:
        common.check_groups(found, self._options.group_size)
        common.check_patterns(found, list(self._options.bits_for))

    def _settings(self, linear: FoundLinear) -> AwqSettings:
        options = self._options
        return AwqSettings(
            bits=common.bits_of(linear, options.bits, options.bits_for),
            group_size=common.group_size_of(linear, options.group_size),
            symmetric=options.symmetric,
            grid=options.grid,
        )

    def scale(self, group: InputGroup, fold: Fold) -> Tensor | None:
        assert group.gram is not None
        weights = [(linear.weight, self._settings(linear)) for linear in group.linears]
        return search_scale(weights, group.gram, group.mean_abs, self._options.grid)

    def make(self, linear: FoundLinear, group: InputGroup) -> QuantLinear:
        gram = group.gram if self._options.clip else None
        weight = clip_and_round(linear.weight, gram, self._settings(linear))
        assert group.gram is not None
        self._errors.append(output_error(linear.weight, weight.dequantize(), group.gram))
        return common.grouped(linear, weight)


class SmoothQuantQuantizer(FoldedQuantizer):
    """int8 linears whose inputs were smoothed (`infermix_quant.smooth`)."""

    name = "smoothquant"
    precision_bits = 7.0  # magnitudes of activations

    def __init__(self, options: SmoothQuantOptions) -> None:
        super().__init__(options)
        self._choice, self.norms_only = options, options.fold == "norms"
        self.num_rows = {"search": SEARCH_ROWS, "fit": FIT_ROWS}.get(str(options.alpha), 0)
        self._found: list[Smoothed] = []
        self._peaks: dict[str, float] = {}
        self.method = (
            f"smoothquant w8a8 int8 per channel, activations {described_activations(options)}, {_described(options)}"
        )

    def chosen(self) -> Mapping[str, Any]:
        alphas = Counter("none" if found.alpha is None else f"{found.alpha:g}" for found in self._found)
        fitted = [found for found in self._found if isinstance(found, Fitted)]
        if fitted:
            return {
                "start_alphas": dict(sorted(alphas.items())),
                "kept_start": sum(found.scale is found.start for found in fitted),
                "mean_ratio_to_start": fmean(found.ratio for found in fitted),
            }
        return {"alphas": dict(sorted(alphas.items()))} if alphas else {}

    def folded(self, layer: CalibrationLayer, linears: Sequence[FoundLinear]) -> None:
        """Static scales are those of the inputs as they are now."""
        if self._choice.activations == "tensor":
            groups = observe(layer, linears, gram=False, magnitudes=True)
            self._peaks.update(peaks_of(groups, self._choice, round_int8_at))

    def scale(self, group: InputGroup, fold: Fold) -> Tensor | None:
        assert group.max_abs is not None
        weights, alpha = [linear.weight for linear in group.linears], self._choice.alpha
        if isinstance(alpha, str):
            return self._best(group, weights, fold, fit_scale if alpha == "fit" else search_alpha)
        return smooth_scale(group.max_abs, weights, alpha)

    def _best(
        self, group: InputGroup, weights: Sequence[Tensor], fold: Fold, find: Callable[..., Smoothed]
    ) -> Tensor | None:
        assert group.rows is not None
        found = find(group.rows, group.max_abs, weights, static=self._choice.activations == "tensor")
        if isinstance(found, Fitted) and not fits(fold, found.scale):  # fp16 ends where a searched scale may not
            error = found.error / max(found.ratio, 1e-30) ** 0.5
            found = replace(found, scale=found.start, error=error, ratio=1.0)
        self._errors.append(found.error)
        self._found.append(found)
        return None if bool((found.scale == 1).all()) else found.scale

    def make(self, linear: FoundLinear, group: InputGroup) -> QuantLinear:
        weight, scale = int8_weight(linear.weight)
        peak = self._peaks.get(linear.name)
        fixed = None if peak is None else static_scale(peak, INT8_MAX, linear)
        return Int8Linear(weight, scale, linear.bias, fixed)


def _described(options: SmoothQuantOptions) -> str:
    searched = {"search": "alpha searched per input", "fit": "scales fitted per input"}
    alpha = options.alpha
    chosen = searched[alpha] if isinstance(alpha, str) else f"alpha {alpha:g}"
    return f"{chosen}{'' if options.fold == 'norms' else ', folded into linears too'}"
