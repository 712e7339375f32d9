"""A forward of the joint reads no value on the host: one that does waits for the device, and no graph holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.engine.bridge import Joint
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

PAD = 3
#: Embedding scales, learned positions, soft caps, norms of queries, merged projections, latent attention.
FAMILIES = ("llama", "gpt2", "gemma2", "qwen3", "phi3", "gemma3_text", "deepseek_v2")


class NoHostReads(TorchDispatchMode):
    """Raises where a tensor's value reaches Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_read_on_the_host(family: str) -> None:
    model = tiny_model(family)
    model.config.pad_token_id = PAD
    joint = Joint(model)
    ids = torch.tensor([PAD, 7, 9, PAD])
    with NoHostReads():
        joint._logits(ids, torch.arange(4), torch.tensor([3]))


def test_the_check_catches_a_read() -> None:
    with pytest.raises(AssertionError, match="on the host"), NoHostReads():
        bool(PAD in torch.tensor([PAD]))
