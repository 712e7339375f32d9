"""`infermix plugins`: every component, its options, needs, provides, and whether it can be used here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infermix.errors import UserError, nearest
from infermix.plugins import Catalogue, load_catalogue
from infermix.roles.component import Component, Registered, Role, no_features
from infermix.roles.facts import LayerFacts, MachineFacts, ModelFacts
from infermix.spec.options import Option, describe_options

if TYPE_CHECKING:
    from rich.console import Console

HELP = "List every registered component with its options, needs and provides, and whether it can be used here."

#: A plain model and machine, on which the rules of components are shown.
SAMPLE_MODEL = ModelFacts(
    source="sample",
    model_type="llama",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=32000,
    hidden_size=512,
    max_position_embeddings=4096,
    layers=(LayerFacts("attention", 8, 8, 64, 64),),
    matrices=(),
)
SAMPLE_MACHINE = MachineFacts("cuda", "sample", 80 << 30, 16, 90)
#: The rules of a component that declares none.
_NO_RULES = (no_features, Component.__dataclass_fields__["adapters"].default)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", nargs="?", help="only this role: " + ", ".join(role.value for role in Role))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def execute(args: argparse.Namespace) -> int:
    role = _role(args.role)
    catalogue = load_catalogue()
    if args.json:
        print(json.dumps(_data(catalogue, role), indent=2))
    else:
        _show(catalogue, role)
    return 0


def _role(text: str | None) -> Role | None:
    names = [role.value for role in Role]
    if text is not None and text not in names:
        raise UserError(f"there is no role {text!r}", hint=nearest(text, names))
    return Role(text) if text is not None else None


def _data(catalogue: Catalogue, role: Role | None) -> dict[str, Any]:
    clashes = {f"{role.value} {name}": text for (role, name), text in catalogue.clashes.items()}
    return {
        "components": [_component_data(registered) for registered in catalogue.all(role)],
        "errors": {**catalogue.errors, **clashes},
    }


def _component_data(registered: Registered) -> dict[str, Any]:
    component, provenance = registered.component, registered.provenance
    return {
        "role": component.role.value,
        "name": component.name,
        "summary": component.summary,
        "options": [option.as_dict() for option in describe_options(component.options)],
        "needs": features(component, component.needs),
        "provides": features(component, component.provides),
        "adapters": features(component, component.adapters),
        "hosts": sorted(role.value for role in component.hosts),
        "ready": registered.unavailable is None,
        "unavailable": registered.unavailable,
        "distribution": provenance.distribution,
        "version": provenance.version,
        "module": provenance.module,
        "source": component.source,
    }


def features(component: Component, rule: Callable[..., Any]) -> list[str] | None:
    """What a rule says with default options on the sample; `None` when it depends on options without a default."""
    if rule in _NO_RULES:
        return []
    if any(option.required for option in describe_options(component.options)):
        return None
    options = component.options()
    found = rule(options, SAMPLE_MODEL, SAMPLE_MACHINE)
    if isinstance(found, dict):
        return sorted(f"{feature} via {adapter}" for feature, adapter in found.items())
    return sorted(found)


def _show(catalogue: Catalogue, role: Role | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for each in Role if role is None else (role,):
        console.print(f"[bold]{each.value}[/bold]")
        for registered in catalogue.all(each):
            _show_component(console, registered)
        console.print()
    for name, reason in sorted(catalogue.errors.items()):
        console.print(f"plugin {name} failed to load: {reason}", style="red", markup=False)
    for text in catalogue.clashes.values():
        console.print(f"{text}: none of them can be used", style="red", markup=False)


def _show_component(console: Console, registered: Registered) -> None:
    component, provenance = registered.component, registered.provenance
    state = f"unavailable: {registered.unavailable}" if registered.unavailable else "ready"
    console.print(f"  {component.name}: {component.summary}", markup=False)
    console.print(
        f"      {state}; from {provenance.distribution} {provenance.version} ({provenance.module})",
        markup=False,
        style="red" if registered.unavailable else "dim",
    )
    for option in describe_options(component.options):
        console.print(f"      {_line(option)}", markup=False)
    for title in ("needs", "provides", "adapters"):
        found = features(component, getattr(component, title))
        if found is None or found:
            console.print(
                f"      {title}: {'depends on options' if found is None else ', '.join(found)}", markup=False
            )
    if component.hosts:
        console.print(f"      hosts: {', '.join(sorted(role.value for role in component.hosts))}", markup=False)


def _line(option: Option) -> str:
    default = "required" if option.required else f"default {json.dumps(option.default)}"
    about = ", ".join(part for part in (option.type, option.unit, option.range, default) if part)
    return f"{option.name} ({about})" + (f": {option.description}" if option.description else "")
