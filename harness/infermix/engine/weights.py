"""What the weights of a loaded model really take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def weight_bytes(model: nn.Module) -> int:
    """Bytes of every distinct parameter and buffer; tied tensors count once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())
