"""The catalogue: every component of every installed plugin, with its provenance.

Plugins are found through the entry-point group `infermix`. One that fails to import does not take the others down:
its error is kept in `Catalogue.errors`. Of components of one role with the same name none can be used, because nobody
could say which one was meant.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from infermix import hookspecs
from infermix.environments import find_python
from infermix.errors import UserError, nearest
from infermix.roles.component import Choice, Component, Provenance, Registered, Role

ENTRY_POINT_GROUP = "infermix"
#: The version of a plugin that no distribution carries.
UNPACKAGED = "unpackaged"

Offers = dict[tuple[Role, str], list[Registered]]


@dataclass(frozen=True)
class Catalogue:
    """All registered components by role and name; `errors` maps entry point -> why it failed to load.

    `clashes` maps names that several components of one role have -> who registered them.
    """

    components: Mapping[Role, Mapping[str, Registered]]
    errors: Mapping[str, str]
    clashes: Mapping[tuple[Role, str], str] = field(default_factory=dict)

    def find(self, role: Role, name: str) -> Registered:
        """Raises `UserError` with the nearest name when there is none, and when there are several."""
        if (role, name) in self.clashes:
            raise UserError(self.clashes[role, name], hint="uninstall one of them or rename it")
        known = self.components[role]
        if name not in known:
            raise UserError(f"no {role} component is called {name!r}", hint=nearest(name, known))
        return known[name]

    def all(self, role: Role | None = None) -> Iterable[Registered]:
        for each in Role if role is None else (role,):
            yield from self.components[each].values()


def distributions(choice: Choice) -> tuple[str, ...]:
    """Names of the packages that decide what a chosen component does: its plugin's, and the libraries it requires."""
    return (choice.registered.provenance.distribution, *choice.component.requires)


def load_catalogue(extra: Mapping[str, Any] | None = None) -> Catalogue:
    """Read every plugin. `extra` (name -> module or object with hooks) adds plugins without an entry point."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    provenances: dict[str, Provenance] = {}
    errors = _register_entry_points(manager, provenances)
    for name, plugin in (extra or {}).items():
        manager.register(plugin, name=name)
        provenances[name] = Provenance(name, UNPACKAGED, getattr(plugin, "__name__", name))
    manager.check_pending()
    offers: Offers = {}
    for plugin_name, plugin in manager.list_name_plugin():
        _collect(plugin, plugin_name, provenances[plugin_name], offers, errors)
    components: dict[Role, dict[str, Registered]] = {role: {} for role in Role}
    for (role, name), offered in offers.items():
        if len(offered) == 1:
            components[role][name] = offered[0]
    return Catalogue(components, errors, _clashes(offers))


def _clashes(offers: Offers) -> dict[tuple[Role, str], str]:
    clashes = {}
    for (role, name), offered in offers.items():
        sources = [f"{each.provenance.distribution} ({each.provenance.module})" for each in offered]
        if len(offered) > 1:
            text = f"{len(offered)} {role.value} components are called {name!r}, from {' and '.join(sources)}"
            clashes[role, name] = text
    return clashes


def _register_entry_points(manager: pluggy.PluginManager, provenances: dict[str, Provenance]) -> dict[str, str]:
    errors: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if (point.name, point.value) in seen:
            continue
        seen.add((point.name, point.value))
        try:
            plugin = point.load()
        except Exception as error:  # a broken plugin may raise anything; it must not take the others down
            errors[point.name] = f"{type(error).__name__}: {error}"
            continue
        manager.register(plugin, name=point.name)
        dist = point.dist
        provenances[point.name] = Provenance(
            dist.name if dist else "unknown", dist.version if dist else "unknown", point.value
        )
    return errors


def _collect(
    plugin: Any,
    plugin_name: str,
    provenance: Provenance,
    offers: Offers,
    errors: dict[str, str],
) -> None:
    for role in Role:
        hook = getattr(plugin, f"infermix_{role.value}", None)
        if hook is None:
            continue
        try:
            offered = hook()
        except Exception as error:  # same reason as above
            errors[plugin_name] = f"infermix_{role.value} raised {type(error).__name__}: {error}"
            continue
        for component in offered:
            if component.role is not role:
                errors[plugin_name] = (
                    f"infermix_{role.value} offers {component.name!r}, whose role is {component.role.value}"
                )
                continue
            registered = Registered(component, provenance, _unavailable(component))
            offers.setdefault((role, component.name), []).append(registered)


def _unavailable(component: Component) -> str | None:
    environment = component.environment
    if environment is not None and find_python(environment) is None:
        return f"needs the environment {environment.name!r}: {environment.command}"
    missing = [name for name in component.requires if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    remedy = f"pip install infermix[{component.extra}]" if component.extra else f"pip install {' '.join(missing)}"
    return f"needs {', '.join(missing)}: {remedy}"
