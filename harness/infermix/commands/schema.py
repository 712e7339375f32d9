"""`infermix schema`: the JSON Schema of experiment files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.spec.schema import experiment_schema

HELP = (
    "Print the JSON Schema of experiment files with the options of every installed component. Editors use it after "
    "the line `# yaml-language-server: $schema=infermix.schema.json`."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file instead")


def execute(args: argparse.Namespace) -> int:
    components = [registered.component for registered in load_catalogue().all()]
    text = json.dumps(experiment_schema(components), indent=2) + "\n"
    if args.output is None:
        print(text, end="")
        return 0
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=args.output) from None
    return 0
