"""`infermix env`: environments of parts whose libraries do not get along with ours."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from infermix import environments
from infermix.errors import UserError, nearest
from infermix.plugins import Catalogue, load_catalogue
from infermix.roles.environment import Environment

HELP = "Make, list or remove the environments of parts whose libraries do not get along with ours."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "create", "remove"))
    parser.add_argument("name", nargs="?", help="which environment (create, remove)")


def execute(args: argparse.Namespace) -> int:
    known = declared(load_catalogue())
    if args.action == "list":
        return _list(known)
    if args.name is None:
        raise UserError(f"env {args.action} needs a name", hint=nearest("", known))
    return _create(args.name, known) if args.action == "create" else _remove(args.name, known)


def declared(catalogue: Catalogue) -> dict[str, Environment]:
    """Name -> environment of every component. Raises `UserError` when two components mean different ones."""
    found: dict[str, Environment] = {}
    for registered in catalogue.all():
        environment = registered.component.environment
        if environment is not None and found.setdefault(environment.name, environment) != environment:
            raise UserError(f"two components declare different environments called {environment.name!r}")
    return found


def _list(known: dict[str, Environment]) -> int:
    for name, environment in sorted(known.items()):
        state = "ready" if environments.find_python(environment) else f"missing: {environment.command}"
        print(f"{name}: {environment.summary}\n    {state}; Python {' or '.join(environment.pythons)}")
        print(f"    {_described(environment.pins)}; without dependencies: {_described(environment.no_deps)}")
    for path in environments.strays(list(known.values())):
        print(f"{path}: of no part here or of other pins; infermix env remove {path.name.rpartition('-')[0]}")
    return 0


def _described(requirements: Iterable[str]) -> str:
    return " ".join(requirements) or "nothing"


def _create(name: str, known: dict[str, Environment]) -> int:
    if name not in known:
        raise UserError(f"no part declares an environment {name!r}", hint=nearest(name, known))
    python = environments.create(known[name], print)
    print(f"ready: {python}")
    return 0


def _remove(name: str, known: dict[str, Environment]) -> int:
    removed = environments.remove(name)
    if not removed and name not in known:
        raise UserError(f"there is no environment {name!r}", hint=nearest(name, known))
    for folder in removed:
        print(f"removed {folder}")
    return 0
