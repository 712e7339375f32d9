"""Transform `triton_sampling`: tokens are picked from the logits by kernels, without a sort."""

from __future__ import annotations

import torch
from infermix.errors import Unsupported, WrongResult
from infermix.roles.transform import Stage, TransformContext, TransformReport
from infermix.toolkit.sampling import TorchSelector
from infermix.toolkit.selection import Filters
from infermix_kernels.greedy import greedy
from infermix_kernels.sampling import MAX_VOCABULARY, SamplingWorkspace, sample
from torch import Tensor, nn

from infermix_triton.fuse_find import random_rows

#: fp32 exponentials against fp64: a draw this near to the border of two tokens may fall on either side.
_NEAR = 2e-6
_CHECKED_ROWS = 8


class TritonSelector:
    """Greedy choice in two launches, filtered draws in four; workspace for up to `max_rows` rows on first use."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._max_rows, self._vocab_size = max_rows, vocab_size
        self._workspace: SamplingWorkspace | None = None

    def greedy(self, logits: Tensor) -> Tensor:
        return greedy(logits)

    def draw(self, logits: Tensor, filters: Filters) -> Tensor:
        return sample(
            logits, filters.temperature, filters.top_k, filters.top_p, filters.min_p, filters.noise,
            workspace=self._room(logits),
        )  # fmt: skip

    def _room(self, logits: Tensor) -> SamplingWorkspace | None:
        """More rows than a step has sequences (verification of drafts) get memory of their own in the call."""
        if logits.shape[0] > self._max_rows or logits.shape[1] > self._vocab_size:
            return None
        if self._workspace is None:
            self._workspace = SamplingWorkspace.allocate(logits.device, self._max_rows, self._vocab_size)
        return self._workspace


class TritonSamplingTransform:
    """Changes no module; the engine's sampler and its captured steps use `selector`."""

    stage: Stage = "after_quantizer"

    def __init__(self) -> None:
        self.selector: TritonSelector | None = None

    def apply(self, model: nn.Module, context: TransformContext) -> TransformReport:
        """Raises `Unsupported` for a vocabulary beyond the kernels' limit, `WrongResult` when a choice differs."""
        vocab_size = context.facts.vocab_size
        if vocab_size > MAX_VOCABULARY:
            raise Unsupported(f"triton_sampling: a vocabulary of {vocab_size}, the kernels cover {MAX_VOCABULARY}")
        selector = TritonSelector(context.max_num_seqs, vocab_size)
        _verify(selector, vocab_size, next(model.parameters()), context.seed)
        self.selector = selector
        return TransformReport(
            name="triton_sampling", replaced={"greedy choice": 1, "filtered draw": 1},
            verified={"greedy choice": 0.0, "filtered draw": 0.0},
        )  # fmt: skip


def _verify(selector: TritonSelector, vocab_size: int, like: Tensor, seed: int) -> None:
    """The same tokens as the plain selector on random logits. Raises `WrongResult`."""
    dtype = like.dtype if like.dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
    logits = random_rows(_CHECKED_ROWS, vocab_size, like.new_empty(0, dtype=dtype), seed) * 4
    plain = TorchSelector()
    chosen = selector.greedy(logits)
    largest = logits.gather(1, chosen[:, None]).squeeze(1)
    if not torch.equal(largest, logits.amax(-1)):
        raise WrongResult(f"triton_sampling: the greedy choice of random logits is {chosen.tolist()}")
    drawn = selector.draw(logits, _filters(logits.device, 1.0))
    allowed = [plain.draw(logits, _filters(logits.device, factor)) for factor in (1.0, 1 + _NEAR, 1 - _NEAR)]
    if not torch.stack([drawn == ids for ids in allowed]).any(0).all():
        raise WrongResult(
            f"triton_sampling: draws from random logits are {drawn.tolist()}, not {allowed[0].tolist()}"
        )


def _filters(device: torch.device, factor: float) -> Filters:
    """Each kind of filter, all together, none, and greedy; noise is scaled by `factor`."""
    rows = [
        (0.8, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.1), (1.0, 7, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.3, 0, 1.0, 0.05),
        (1.3, 50, 0.9, 0.02), (1.0, 0, 0.0, 0.0), (2.0, 40, 1.0, 0.0),
    ]  # fmt: skip
    temperature, top_k, top_p, min_p = torch.tensor(rows, dtype=torch.float64, device=device).unbind(1)
    noise = (torch.arange(_CHECKED_ROWS, dtype=torch.float64, device=device) + 0.37) / _CHECKED_ROWS * factor
    floats = (each.contiguous() for each in (temperature, top_p, min_p))
    temperature, top_p, min_p = floats
    return Filters(temperature, top_k.long().contiguous(), top_p, min_p, noise)
