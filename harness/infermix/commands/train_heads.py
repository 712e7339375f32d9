"""`infermix train-heads MODEL`: draft heads trained on the model's own output, written as decoders load them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infermix.commands.arguments import parse_options, positive, rate
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import locate_model
from infermix.errors import Unsupported, UserError
from infermix.measure.clock import now_ns
from infermix.plugins import load_catalogue
from infermix.roles.component import Registered, Role
from infermix.spec.experiment import ModelSource
from infermix.spec.validate import Report, check_struct

if TYPE_CHECKING:
    from infermix.roles.training import HeadTraining, OwnOutput, Trainer

HELP = (
    "Train the draft heads of a decoder for a model, whose weights stay as they are: the model continues prompts of "
    "a corpus, and the heads learn to say in advance what it says (self-distillation)."
)
#: Of the time limit, for making texts.
_SHARE_FOR_TEXTS = 0.4
_HELD_OUT = 0.05


def now_s() -> float:
    return now_ns() / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="package:NAME, a directory, a .gguf file, or a Hugging Face id")
    parser.add_argument(
        "--method", required=True, metavar="DECODER[:OPTION=VALUE,...]", help="whose heads, and how they are trained"
    )
    parser.add_argument(
        "--corpus", required=True, nargs="+", metavar="FILE",
        help=".jsonl files of prompts, questions or chats, text files, or pydoc_data.topics",
    )  # fmt: skip
    parser.add_argument("--exclude", nargs="+", default=[], metavar="FILE", help=".jsonl prompts not to train on")
    parser.add_argument("--output", required=True, type=Path, help="folder for the heads")
    parser.add_argument("--steps", type=positive, default=1000, help="steps of training (1000)")
    parser.add_argument("--time-limit-s", type=rate, help="end earlier, after so many seconds in all")
    parser.add_argument("--batch-tokens", type=positive, default=8192, help="tokens of a step (8192)")
    parser.add_argument("--learning-rate", type=rate, default=1e-3, help="highest learning rate (0.001)")
    parser.add_argument("--prompts", type=positive, default=4096, help="most prompts that are continued (4096)")
    parser.add_argument("--prompt-tokens", type=positive, default=512, help="longest prompt (512)")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens of a continuation (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the continuations (0: greedy)")
    parser.add_argument("--generate-batch", type=positive, default=64, help="prompts continued at once (64)")
    parser.add_argument("--seed", type=int, default=0, help="draws prompts, texts and batches (0)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 (auto: the checkpoint's)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")


def execute(args: argparse.Namespace) -> int:
    started = now_s()
    trainer, options = _trainer(args.method)
    training, texts_s = _prepare(args, started)
    figures = trainer.train(options, training)
    total = {"texts": len(training.samples), "texts_s": texts_s, "total_s": now_s() - started}
    print(json.dumps({**figures, **total, "output": str(args.output)}, indent=2))
    return 0


def _trainer(text: str) -> tuple[Trainer, Any]:
    """Raises `UserError` for a decoder that there is not, that trains nothing, or whose options are wrong."""
    name, _, given = text.partition(":")
    catalogue = load_catalogue()
    able = [each.component.name for each in catalogue.all(Role.DECODER) if each.component.trainer is not None]
    registered: Registered = catalogue.find(Role.DECODER, name)
    trainer = registered.component.trainer
    if trainer is None:
        raise UserError(f"decoder {name!r} has nothing to train", where="--method", hint=f"one of {', '.join(able)}")
    if registered.unavailable:
        raise Unsupported(f"decoder {name!r} {registered.unavailable}")
    report = Report()
    kind: Any = trainer.options
    options = check_struct(parse_options(given, "--method"), kind, ("--method",), report)
    report.raise_any()
    return trainer, options


def _prepare(args: argparse.Namespace, started: float) -> tuple[HeadTraining, float]:
    import torch

    from infermix.engine.loader import load_model, load_tokenizer
    from infermix.roles.training import HeadTraining
    from infermix.workload.training_prompts import training_prompts

    source = locate_model(ModelSource(source=args.model), Path.cwd())
    facts = read_model_facts(source, dtype=args.dtype)
    device = machine_facts(args.device).device
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise UserError("the model has no tokenizer, so no corpus can be read", where=args.model)
    most = min(args.prompt_tokens, facts.max_position_embeddings - args.new_tokens)
    prompts = training_prompts(
        args.corpus, tokenizer, exclude=args.exclude, max_tokens=most, base=Path.cwd(), seed=args.seed
    )[: args.prompts]
    loaded = load_model(source, facts, dtype=facts.dtype, device=device, seed=args.seed)
    model: Any = loaded.model
    if getattr(model, "_supports_sdpa", False):
        model.set_attn_implementation("sdpa")
    if device != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = True
    begun = now_s()
    samples, held_out = _texts(args, model, prompts, loaded.eos_token_ids, started)
    training = HeadTraining(
        model=model, samples=samples, held_out=held_out, batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate, seed=args.seed, output=args.output,
        about={"base_model": source.label, "tokens": sum(len(each.token_ids) for each in samples)},
        share_done=_share_done(args, started, now_s()), progress=_tell,
    )  # fmt: skip
    return training, now_s() - begun


def _texts(
    args: argparse.Namespace, model: Any, prompts: list[Any], eos_token_ids: tuple[int, ...], started: float
) -> tuple[tuple[OwnOutput, ...], tuple[OwnOutput, ...]]:
    """Texts to train on, and a few to judge by."""
    from infermix.engine.self_output import own_outputs

    limit = args.time_limit_s

    def go_on(fraction: float) -> bool:
        print(f"texts {fraction:.0%}", file=sys.stderr)
        return limit is None or now_s() - started < _SHARE_FOR_TEXTS * limit

    made = own_outputs(
        model, prompts, max_new_tokens=args.new_tokens, temperature=args.temperature, batch=args.generate_batch,
        eos_token_ids=eos_token_ids, seed=args.seed, go_on=go_on,
    )  # fmt: skip
    long_enough = [each for each in made if len(each.token_ids) > each.num_prompt_tokens + 1]
    if len(long_enough) < 2:
        raise UserError("the model ends its texts at once", where=", ".join(args.corpus), hint="give other prompts")
    held = max(1, int(_HELD_OUT * len(long_enough)))
    return tuple(long_enough[held:]), tuple(long_enough[:held])


def _share_done(args: argparse.Namespace, started: float, begun: float) -> Callable[[int], float]:
    """By steps, or by the time that is left after the texts."""

    def share(step: int) -> float:
        by_steps = step / args.steps
        if args.time_limit_s is None:
            return min(1.0, by_steps)
        left = max(args.time_limit_s - (begun - started), 1e-9)
        return min(1.0, max(by_steps, (now_s() - begun) / left))

    return share


def _tell(step: int, loss: float) -> None:
    if step % 50 == 1:
        print(f"step {step}: loss {loss:.3f}", file=sys.stderr)
