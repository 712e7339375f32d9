"""What `infermix train-heads` trains on: prompts of a corpus and of the model's own, continued."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infermix.errors import UserError
from infermix.measure.clock import now_ns

if TYPE_CHECKING:
    from infermix.roles.facts import ResolvedSource
    from infermix.roles.training import OwnOutput
    from infermix.workload.training_prompts import Prompt

#: Of the time that is left when the model is ready: until its own prompts are there, and until the texts are.
_SHARE_FOR_PROMPTS, _SHARE_FOR_TEXTS = 0.1, 0.3
#: Arguments that decide what the texts are.
_DECIDE_TEXTS = (
    "model", "dtype", "corpus", "exclude", "prompts", "prompt_tokens", "new_tokens", "temperature", "seed",
)  # fmt: skip
#: Those that count only when they are given, so that files from before there were any still do.
_DECIDE_IF_GIVEN = ("parts", "self_prompts")  # a quantizer, a part, makes another model
#: Beside the reasons of `choose_prompts`: the time limit came before the turn's end.
_CUT = "out_of_time"


@dataclass(frozen=True)
class Texts:
    """Texts of more than one token, shuffled. `counts` tell what became of the prompts that the model wrote."""

    made: list[OwnOutput]
    counts: Mapping[str, Any]

    @property
    def num_output_tokens(self) -> int:
        return sum(each.num_output_tokens for each in self.made)

    @property
    def about(self) -> dict[str, Any]:
        """Where the prompts come from, for figures and the heads' config."""
        from infermix.workload.own_texts import ORIGINS

        found = Counter(each.origin for each in self.made)
        return {"prompts_from": {origin: found[origin] for origin in ORIGINS}, **self.counts}


def now_s() -> float:
    return now_ns() / 1e9


def check_arguments(args: argparse.Namespace) -> None:
    """Raises `UserError` where there is nothing to make prompts of, or no place for the texts."""
    if not args.corpus and args.self_prompts is None:
        raise UserError("there are no prompts", where="--corpus", hint="give files, --self-prompts N, or both")
    if args.texts is not None and not args.texts.absolute().parent.is_dir():
        raise UserError(f"{args.texts.absolute().parent} is no folder", where=f"--texts {args.texts}")


def check_template(args: argparse.Namespace, source: ResolvedSource) -> None:
    """Before the weights are read. Raises `UserError` for a model that cannot write prompts and is asked to."""
    from infermix.engine.loader import load_tokenizer
    from infermix.workload.self_prompts import turn_sampling, user_turn

    if args.self_prompts is None or has_texts(args):
        return
    tokenizer = load_tokenizer(source)
    if tokenizer is not None:
        turn_sampling(user_turn(tokenizer), 1, max_tokens=args.prompt_tokens, seed=args.seed)


def has_texts(args: argparse.Namespace) -> bool:
    return args.texts is not None and args.texts.exists()


def own_texts(args: argparse.Namespace, engine: Any, started: float) -> Texts:
    """The texts, out of the file where there is one. Raises `UserError` for fewer than two of them."""
    from infermix.workload.own_texts import read_texts, write_texts

    about = {name: getattr(args, name) for name in _DECIDE_TEXTS}
    about |= {name: getattr(args, name) for name in _DECIDE_IF_GIVEN if getattr(args, name)}
    if has_texts(args):
        made, counts = read_texts(args.texts, about, engine.tokenizer.vocab_size)
    else:
        made, counts = _continued(args, engine, started)
        if args.texts is not None:
            write_texts(args.texts, made, about, counts)
    kept = [each for each in made if each.num_output_tokens > 1]
    if len(kept) < 2:
        told = f"{len(kept)} of {len(made)} texts have more than one token; two are needed, one of them held out"
        raise UserError(told, where=_where(args), hint="give other prompts, or more")
    random.Random(args.seed).shuffle(kept)  # short texts end first
    return Texts(kept, counts)


def _where(args: argparse.Namespace) -> str:
    return ", ".join([*args.corpus, *([f"--self-prompts {args.self_prompts}"] if args.self_prompts else [])])


def _continued(args: argparse.Namespace, engine: Any, started: float) -> tuple[list[OwnOutput], dict[str, Any]]:
    """What the model makes of the prompts. Raises `UserError` when the time limit ends before there are texts."""
    from infermix.engine.self_output import own_outputs

    corpus = _corpus_prompts(args, engine.tokenizer)
    ready = now_s()
    left = None if args.time_limit_s is None else args.time_limit_s - (ready - started)
    own, counts = _self_prompts(args, engine, corpus, _until(ready, left, _SHARE_FOR_PROMPTS))
    prompts = _together(corpus, own, args.seed)
    made = own_outputs(
        engine, prompts, max_new_tokens=args.new_tokens, temperature=args.temperature, seed=args.seed,
        go_on=_until(ready, left, _SHARE_FOR_TEXTS),
    )  # fmt: skip
    print(f"{len(made)} texts of {len(prompts)} prompts in {now_s() - ready:.0f} s", file=sys.stderr)
    if left is not None and len(made) < min(2, len(prompts) + _num_cut(counts)):
        told = (
            f"the model was ready after {ready - started:.0f} s, and {now_s() - ready:.0f} s made {len(made)} texts"
        )
        raise UserError(told, where=f"--time-limit-s {args.time_limit_s:g}", hint="give more seconds")
    return _with_origin(made, own), counts


def _until(ready: float, left: float | None, share: float) -> Callable[[int], bool]:
    return lambda num_done: left is None or now_s() - ready < share * left


def _corpus_prompts(args: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    from infermix.workload.training_prompts import training_prompts

    if not args.corpus:
        return []
    found = training_prompts(
        args.corpus, tokenizer, exclude=args.exclude, max_tokens=args.prompt_tokens, base=Path.cwd(), seed=args.seed
    )
    return found[: args.prompts]


def _self_prompts(
    args: argparse.Namespace, engine: Any, corpus: list[Prompt], go_on: Callable[[int], bool]
) -> tuple[list[Prompt], dict[str, Any]]:
    """Prompts that the model writes, in an order that does not depend on which ended first; what became of all."""
    from infermix.engine.self_output import completions
    from infermix.workload.self_prompts import TEMPERATURE, choose_prompts, turn_sampling, user_turn
    from infermix.workload.training_prompts import excluded_texts

    if args.self_prompts is None:
        return [], {}
    excluded, tokenizer = excluded_texts(args.exclude, Path.cwd()), engine.tokenizer
    turn = user_turn(tokenizer)
    sampling = turn_sampling(turn, args.self_prompts, max_tokens=args.prompt_tokens, seed=args.seed)
    drawn = sorted(completions(engine, [turn.before] * len(sampling), sampling, go_on=go_on))
    prompts, dropped = choose_prompts(
        turn, (ids for _, ids in drawn), tokenizer, max_tokens=args.prompt_tokens, excluded=excluded, taken=corpus
    )
    dropped[_CUT] = len(sampling) - len(drawn)
    told: dict[str, Any] = {"asked": len(sampling), "used": len(prompts), "dropped": dict(dropped)}
    print(f"the model wrote prompts: {told}", file=sys.stderr)
    return prompts, {"self_prompts": {**told, "temperature": TEMPERATURE, "most_tokens": sampling[0].max_new_tokens}}


def _num_cut(counts: Mapping[str, Any]) -> int:
    """Prompts of its own that the model had no time to write."""
    return int(counts["self_prompts"]["dropped"][_CUT]) if counts else 0


def _together(corpus: list[Prompt], own: list[Prompt], seed: int) -> list[Prompt]:
    """Shuffled, so that each kind has its share when time ends; prompts of a corpus alone are so already."""
    both = [*corpus, *own]
    if own:
        random.Random(seed).shuffle(both)
    return both


def _with_origin(made: list[OwnOutput], own: list[Prompt]) -> list[OwnOutput]:
    written = set(own)
    return [
        replace(each, origin="self") if each.token_ids[: each.num_prompt_tokens] in written else each for each in made
    ]
