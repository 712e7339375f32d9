"""Calls that repeat: the layers of one step differ in their tensors only, so what was decided once is launched again.

Choosing a launch and binding its sixty arguments costs the host several times what a launch itself costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infermix_kernels.attention_call import Prepared, Workspace

#: How many different calls are remembered: shapes of steps, not layers.
_REMEMBERED = 512
_POOLS = {"key_desc": "keys", "value_desc": "values"}


class _Step:
    """One kernel of a call, compiled by its first launch."""

    def __init__(self, prepared: Prepared, tensors: Mapping[str, Tensor | None]) -> None:
        names = prepared.kernel.arg_names
        self._compiled = prepared.kernel[prepared.grid](*prepared.arguments, **prepared.constants)
        self._grid = (*prepared.grid, 1)
        self._arguments = [
            *prepared.arguments,
            *(prepared.constants[name] for name in names[len(prepared.arguments) :]),
        ]
        self._tensors = [(index, name) for index, name in enumerate(names) if tensors.get(name) is not None]
        self._descriptors = [
            (index, _POOLS[names[index]], (value.shape, value.strides, value.block_shape))
            for index, value in enumerate(prepared.arguments)
            if isinstance(value, TensorDescriptor)
        ]

    def forget(self) -> None:
        """Let go of the tensors of the first call, which are replaced in every other."""
        for index, _ in self._tensors:
            self._arguments[index] = None
        for index, *_ in self._descriptors:
            self._arguments[index] = None

    def run(self, tensors: Mapping[str, Tensor | None]) -> None:
        arguments: list[Any] = list(self._arguments)
        for index, name in self._tensors:
            arguments[index] = tensors[name]
        for index, pool, described in self._descriptors:
            arguments[index] = TensorDescriptor(tensors[pool], *described)
        self._compiled[self._grid](*arguments)


class Repeat:
    """A call that was launched and can be launched again on other tensors of the same shapes and alignment.

    `tensors` are named as the kernels name their arguments. Those of the first call are not kept.
    """

    def __init__(self, prepared: Prepared, tensors: Mapping[str, Tensor | None]) -> None:
        self._steps: list[_Step] = []
        following: Prepared | None = prepared
        while following is not None:
            self._steps.append(_Step(following, tensors))
            following = following.then
        for step in self._steps:
            step.forget()

    def run(self, tensors: Mapping[str, Tensor | None]) -> None:
        for step in self._steps:
            step.run(tensors)


@lru_cache(maxsize=_REMEMBERED)
def remembered(signature: Hashable) -> list[Repeat]:
    """The place where the call with this signature is kept: empty until it was made once."""
    return []


def run_repeatedly(
    tensors: Mapping[str, Tensor | None],
    facts: Hashable,
    workspace: Workspace | None,
    prepare: Callable[[], Prepared],
) -> None:
    """Launch a call, prepared only the first time where nothing is allocated for it (`workspace` is given).

    `facts` is everything besides the tensors that `prepare` depends on, the name of the entry first.
    """
    if workspace is None or not tensors["q"].is_cuda:  # type: ignore[union-attr]
        prepare().run()
        return
    known = remembered(signature_of(tensors, facts))
    if known:
        known[0].run(tensors)
    else:
        known.append(Repeat(prepare(), tensors))


def signature_of(tensors: Mapping[str, Tensor | None], *others: Hashable) -> Hashable:
    """Everything that a launch depends on besides addresses: shapes, strides, dtypes, alignment, device."""
    facts: list[Hashable] = []
    aligned = True
    for tensor in tensors.values():
        if tensor is None:
            facts.append(None)
        else:
            facts.append((tensor.shape, tensor.stride(), tensor.dtype))
            aligned = aligned and tensor.data_ptr() % 16 == 0
    return (aligned, tensors["q"].device, *facts, *others)  # type: ignore[union-attr]
