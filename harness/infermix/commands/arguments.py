"""What the verbs that take a model on the command line share."""

from __future__ import annotations

import argparse
from typing import Any

from infermix.errors import UserError
from infermix.roles.facts import ModelFacts

_DEFAULT_CONTEXT = 2048


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the sizes, and the machine."""
    parser.add_argument(
        "model", help="shape:NAME, package:NAME, a directory, a .gguf or config.json file, or a Hugging Face id"
    )
    parser.add_argument("--context", type=positive, default=None, help="tokens of a sequence (2048, or the model's)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences that decode together (1)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 (auto: the checkpoint's)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--memory-gb", type=rate, help="GB of device memory instead of this machine's")


def context_tokens(args: argparse.Namespace, facts: ModelFacts) -> int:
    """`--context`, or a default that the model holds. Raises `UserError` beyond the model's positions."""
    context: int = args.context or min(_DEFAULT_CONTEXT, facts.max_position_embeddings)
    if context > facts.max_position_embeddings:
        raise UserError(f"the model has {facts.max_position_embeddings} positions, not {context}", where="--context")
    return context


def positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return value


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def parse_options(text: str, where: str) -> dict[str, Any]:
    """`block_size=32,bits=4` as keys and YAML values."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    return {key.strip(): _value(value, where) for key, _, value in pairs}


def _value(text: str, where: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{text!r} is no value", where=where) from None
