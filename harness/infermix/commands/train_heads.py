"""`infermix train-heads MODEL`: draft heads trained on the model's own output, written as decoders load them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from infermix.commands.arguments import not_negative, parse_options, positive, rate
from infermix.commands.train_texts import check_arguments, check_template, has_texts, now_s, own_texts
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import locate_model
from infermix.errors import Unsupported, UserError, nearest
from infermix.measure.clock import now_ns
from infermix.plugins import Catalogue, load_catalogue
from infermix.roles.component import PART_ROLES, Choice, Registered, Role
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource
from infermix.spec.validate import Report, check_struct

if TYPE_CHECKING:
    from infermix.roles.training import HeadTraining, Trainer

HELP = (
    "Train the draft heads of a decoder for a model, whose weights stay as they are: the model continues prompts of "
    "a corpus or its own, and the heads learn to say in advance what it says (self-distillation)."
)
_HELD_OUT = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="package:NAME, a directory, a .gguf file, or a Hugging Face id")
    parser.add_argument(
        "--method", required=True, metavar="DECODER[:OPTION=VALUE,...]", help="whose heads, and how they are trained"
    )
    parser.add_argument(
        "--corpus", nargs="+", default=[], metavar="FILE",
        help=".jsonl files of prompts, questions or chats, text files, or pydoc_data.topics",
    )  # fmt: skip
    parser.add_argument(
        "--self-prompts", type=positive, metavar="N",
        help="let the model write N prompts itself, drawn at temperature 1 where its chat template has the user "
        "speak, each at most --prompt-tokens long; those that do not end, empty ones and duplicates are dropped",
    )  # fmt: skip
    parser.add_argument("--exclude", nargs="+", default=[], metavar="FILE", help=".jsonl prompts not to train on")
    parser.add_argument("--output", required=True, type=Path, help="folder for the heads")
    parser.add_argument("--steps", type=positive, default=1000, help="steps of training (1000)")
    parser.add_argument("--time-limit-s", type=rate, help="end earlier, after so many seconds in all")
    parser.add_argument("--batch-tokens", type=positive, default=8192, help="tokens of a step (8192)")
    parser.add_argument("--learning-rate", type=rate, default=1e-3, help="highest learning rate (0.001)")
    parser.add_argument("--prompts", type=positive, default=4096, help="most prompts of the corpus (4096)")
    parser.add_argument("--prompt-tokens", type=positive, default=384, help="longest prompt, as a chat (384)")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens of a continuation (128)")
    parser.add_argument("--temperature", type=not_negative, default=0.0, help="of the continuations (0: greedy)")
    parser.add_argument(
        "--texts", type=Path, metavar="FILE",
        help="keep the continuations in this file; when it exists, train on those in it and make none",
    )  # fmt: skip
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="ROLE=NAME[:OPTION=VALUE,...]",
        help="parts of the engine that makes the continuations (attention=triton, scheduler=static:batch_size=512)",
    )  # fmt: skip
    parser.add_argument("--sequences", type=positive, default=64, help="prompts continued at once (64)")
    parser.add_argument("--seed", type=int, default=0, help="draws prompts, texts and batches (0)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 (auto: the checkpoint's)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")


def execute(args: argparse.Namespace) -> int:
    started, catalogue = now_s(), load_catalogue()
    trainer, options = _trainer(args.method, catalogue)
    _check_output(args.output, args.model)
    check_arguments(args)
    training = _prepare(args, catalogue, started)
    texts_s = now_s() - started
    figures = trainer.train(options, training)
    spent = {"texts": len(training.samples), "texts_s": texts_s, "total_s": now_s() - started}
    print(json.dumps({**figures, **training.about, **spent, "output": str(args.output)}, indent=2))
    return 0


def _check_output(folder: Path, model: str) -> None:
    """Before hours of training. Raises `UserError` for a folder that cannot be written to, or that is the model's."""
    if folder.exists() and Path(model).exists() and folder.samefile(model):
        raise UserError("is the folder of the model, whose files heads would replace", where=f"--output {folder}")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"{above} is no folder that can be written to", where=f"--output {folder}")


def _checked(kind: Any, text: str, where: str) -> Any:
    """Options out of `KEY=VALUE,...`. Raises `UserError` for wrong ones."""
    report = Report()
    options = check_struct(parse_options(text, where), kind, (where,), report)
    report.raise_any()
    return options


def _usable(registered: Registered, role: str) -> Registered:
    if registered.unavailable:
        raise Unsupported(f"{role} {registered.component.name!r} {registered.unavailable}")
    return registered


def _trainer(text: str, catalogue: Catalogue) -> tuple[Trainer, Any]:
    """Raises `UserError` for a decoder that there is not, that trains nothing, or whose options are wrong."""
    name, _, given = text.partition(":")
    able = [each.component.name for each in catalogue.all(Role.DECODER) if each.component.trainer is not None]
    if name not in able:
        raise UserError(f"no decoder {name!r} has heads to train", where="--method", hint=nearest(name, able))
    trainer = _usable(catalogue.find(Role.DECODER, name), "decoder").component.trainer
    assert trainer is not None
    return trainer, _checked(trainer.options, given, "--method")


def _parts(given: list[str], catalogue: Catalogue) -> dict[Role, Choice]:
    """The default parts, but for those that are named."""
    wanted = dict(DEFAULT_PARTS)
    for text in given:
        role, _, choice = text.partition("=")
        if role not in wanted or not choice:
            raise UserError(f"{text!r} names no part", where="--parts", hint=f"ROLE=NAME of {', '.join(wanted)}")
        wanted[role] = choice
    parts = {}
    for role in PART_ROLES:
        name, _, options = wanted[role.value].partition(":")
        registered = _usable(catalogue.find(role, name), role.value)
        parts[role] = Choice(registered, _checked(registered.component.options, options, "--parts"))
    return parts


def _engine(args: argparse.Namespace, catalogue: Catalogue) -> Any:
    from infermix.engine.assembly import assemble
    from infermix.engine.components import NativeOptions
    from infermix.roles.engine import EngineContext

    source = locate_model(ModelSource(source=args.model), Path.cwd())
    facts = read_model_facts(source, dtype=args.dtype)
    check_template(args, source)
    longest = args.prompt_tokens + args.new_tokens
    if longest > facts.max_position_embeddings:
        raise UserError(
            f"{longest} tokens are more than the {facts.max_position_embeddings} positions of the model",
            where="--prompt-tokens", hint="lower it, or --new-tokens",
        )  # fmt: skip
    context = EngineContext(
        source=source, facts=facts, machine=machine_facts(args.device), dtype=facts.dtype,
        parts=_parts(args.parts, catalogue), max_model_len=longest, max_num_seqs=args.sequences, seed=args.seed,
        clock_ns=now_ns, base=Path.cwd(), find=catalogue.find,
    )  # fmt: skip
    graphs: Literal["auto", "off"] = "off" if has_texts(args) else "auto"
    return assemble(NativeOptions(mixed_graph_tokens=0, graphs=graphs), context)


def _prepare(args: argparse.Namespace, catalogue: Catalogue, started: float) -> HeadTraining:
    from infermix.roles.training import HeadTraining

    engine = _engine(args, catalogue)
    if engine.tokenizer is None:
        raise UserError("the model has no tokenizer, so no corpus can be read", where=args.model)
    texts = own_texts(args, engine, started)
    made = texts.made
    model = engine.model
    engine.close()
    if getattr(model, "_supports_sdpa", False):
        model.set_attn_implementation("sdpa")
    held = max(1, int(_HELD_OUT * len(made)))
    return HeadTraining(
        model=model, samples=tuple(made[held:]), held_out=tuple(made[:held]), batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate, seed=args.seed, output=args.output,
        about={"base_model": args.model, "output_tokens": texts.num_output_tokens, **texts.about},
        share_done=_share_done(args, started, now_s()), progress=_tell,
    )  # fmt: skip


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
