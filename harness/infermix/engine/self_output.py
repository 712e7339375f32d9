"""Texts of a model's own: what it makes of prompts, by transformers' `generate` in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from infermix.roles.training import OwnOutput

Prompt = tuple[int, ...]


def own_outputs(
    model: Any,
    prompts: Seq[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    batch: int,
    eos_token_ids: tuple[int, ...],
    seed: int = 0,
    go_on: Callable[[float], bool] = lambda fraction: True,
) -> list[OwnOutput]:
    """One text per prompt, `batch` prompts of similar length at once, until `go_on(fraction done)` says no.

    Which prompts have had their turn by then is random, not their order by length.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    made: list[OwnOutput] = []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.manual_seed(seed)
        groups = list(_groups(prompts, batch))
        order = torch.randperm(len(groups)).tolist()
        for done, index in enumerate(order):
            made += _continue(model, groups[index], max_new_tokens, temperature, eos_token_ids)
            if not go_on((done + 1) / len(order)):
                break
    return made


def _groups(prompts: Seq[Prompt], batch: int) -> Iterator[list[Prompt]]:
    ordered = sorted(prompts, key=len)
    for start in range(0, len(ordered), batch):
        yield ordered[start : start + batch]


def _continue(
    model: Any, prompts: list[Prompt], max_new_tokens: int, temperature: float, eos_token_ids: tuple[int, ...]
) -> list[OwnOutput]:
    from transformers import GenerationConfig

    ids, mask = _padded_left(prompts, eos_token_ids[0] if eos_token_ids else 0, model.device)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    )
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        **sampling,
    )
    rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :].tolist()
    return [
        OwnOutput((*prompt, *_until_end(row, eos_token_ids)), len(prompt))
        for prompt, row in zip(prompts, rows, strict=True)
    ]


def _padded_left(prompts: list[Prompt], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[*[pad] * (width - len(prompt)), *prompt] for prompt in prompts])
    mask = torch.tensor([[*[0] * (width - len(prompt)), *[1] * len(prompt)] for prompt in prompts])
    return ids.to(device), mask.to(device)


def _until_end(row: list[int], eos_token_ids: tuple[int, ...]) -> list[int]:
    """The token that ends the text belongs to it."""
    end = next((index for index, token in enumerate(row) if token in eos_token_ids), len(row) - 1)
    return row[: end + 1]
