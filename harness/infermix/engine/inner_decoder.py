"""A decoder that the options of another one name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from infermix.errors import Unsupported, UserError
from infermix.roles.component import Component, Role, meets

if TYPE_CHECKING:
    from infermix.engine.assembly import Assembly
    from infermix.roles.decoder import DecoderContext


def inner_decoder(build: Assembly, context: DecoderContext, name: str, options: dict[str, Any]) -> Any:
    """Raises `UserError` for a decoder or an option that does not exist, `Unsupported` where parts lack its needs."""
    if build.context.find is None:
        raise UserError("this engine was built without a catalogue, so no decoder can be named inside another")
    registered = build.context.find(Role.DECODER, name)
    if registered.unavailable:
        raise Unsupported(f"decoder {name!r} {registered.unavailable}")
    component = registered.component
    try:
        converted = msgspec.convert(options, component.options)
    except msgspec.ValidationError as error:
        raise UserError(f"options of decoder {name!r}: {error}", key="parts.decoder.decoder_options") from error
    _refuse_unmet(build, component, converted)
    return component.build(converted, context)


def _refuse_unmet(build: Assembly, component: Component, options: Any) -> None:
    """The plan knows the needs of the decoder outside, not of one that its options name."""
    given = (build.context.facts, build.context.machine)
    provided = frozenset[str]().union(
        *(part.component.provides(part.options, *given) for part in build.context.parts.values())
    )
    unmet = [need for need in sorted(component.needs(options, *given)) if not meets(need, provided)]
    if unmet:
        raise Unsupported(f"decoder {component.name!r} needs {', '.join(unmet)}, which no part provides")
