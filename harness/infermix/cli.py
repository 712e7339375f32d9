"""The command line: finds the verb, parses, dispatches. Each verb is a module of `infermix.commands`.

A verb module has `HELP: str`, `add_arguments(parser)` and `execute(args) -> int`; only the chosen one is imported.
Exit codes: 0 fine, 1 the verb's own bad news, 2 bad input, 130 interrupted. Tracebacks are for our own faults.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from infermix.errors import InfermixError, UserError, nearest

VERBS = {
    "run": "run or resume every cell of an experiment",
    "plan": "say what each cell would do, and run nothing",
    "find-rate": "find the largest request rate whose goodput stays above a share",
    "calibrate": "fit a model of step times to measured steps, for simulations",
    "predict": "simulate the cells of measured records and say how far off that is",
    "plugins": "list components with their options, needs and provides",
    "schema": "print the JSON Schema of experiment files",
    "leaderboard": "publish tables from records",
    "compare": "compare two records or groups of records",
    "show": "show one record in full",
    "cost": "parameters, bytes, FLOPs and ideal step time of a model",
    "kv": "bytes of the KV cache in every layout, and how many sequences fit",
    "train-heads": "train draft heads of a decoder on a model's own output",
    "doctor": "what this machine has and which parts can run on it",
    "env": "make, list or remove environments of parts that need one of their own",
    "new-plugin": "write a working plugin package",
}
BAD_INPUT = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `infermix` script; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except InfermixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    top = _top_parser()
    if not arguments or arguments[0].startswith("-"):
        top.parse_args(arguments)
        top.print_help()
        return BAD_INPUT if arguments else 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise UserError(f"there is no command {verb!r}", hint=nearest(verb, VERBS))
    module = importlib.import_module("infermix.commands." + verb.replace("-", "_"))
    parser = argparse.ArgumentParser(prog=f"infermix {verb}", description=module.HELP)
    module.add_arguments(parser)
    code: int = module.execute(parser.parse_args(rest))
    sys.stdout.flush()
    return code


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, VERBS))
    listing = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="infermix",
        usage="infermix COMMAND ...",
        description="Mix LLM inference parts, run every combination, publish numbers that can be trusted.",
        epilog=f"commands:\n{listing}\n\n`infermix COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("infermix"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
