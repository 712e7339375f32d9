"""Whether two processes see the same memory of a GPU: tried with a known pattern, before anything is handed over."""

from __future__ import annotations

import torch
from infermix.errors import Unsupported
from torch import Tensor

from infermix_disaggregated.device_memory import opened, share
from infermix_disaggregated.messages import Probed
from infermix_disaggregated.prefiller import Prefiller

_LENGTH = 4096


def probed(device: str) -> Probed:
    """The sending side."""
    if not device.startswith("cuda"):
        return Probed(reason=f"KV is on {device}")
    try:
        return Probed(share(_pattern(device)))
    except RuntimeError as error:
        return Probed(reason=f"the prefill worker cannot share memory: {_first_line(error)}")


def device_refusal(prefill: Prefiller, device: str) -> str | None:
    """Why KV cannot stay on the device, `None` when the pattern came through."""
    found = prefill.probe()
    if found.block is None:
        return found.reason
    try:
        data = opened(found.block)
        if not torch.equal(data, _pattern(device)):
            return "a pattern that the prefill worker wrote reads differently here"
    except RuntimeError as error:
        return f"memory of the prefill worker cannot be opened: {_first_line(error)}"
    return None


def choose_way(wanted: str, prefill: Prefiller, device: str) -> tuple[bool, str | None]:
    """Whether KV stays on the device, and why not. Raises `Unsupported` when `device` is wanted and cannot be."""
    if wanted == "host":
        return False, None
    refusal = device_refusal(prefill, device)
    if refusal is not None and wanted == "device":
        raise Unsupported(f"handover: device: {refusal}")
    prefill.hand_over(on_device=refusal is None)
    return refusal is None, refusal


def _pattern(device: str) -> Tensor:
    return (torch.arange(_LENGTH, device=device) * 167 % 251).to(torch.uint8)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
