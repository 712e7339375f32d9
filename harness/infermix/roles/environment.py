"""An environment of its own, for libraries that do not get along with ours. Data only, no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What `infermix env create NAME` installs.

    `pythons` are the versions that the libraries work with, such as `3.11`, the preferred one first. `pins` are exact
    requirements that are resolved together; those of `no_deps` come afterwards, without what they ask for.
    """

    name: str
    summary: str
    pythons: tuple[str, ...]
    pins: tuple[str, ...] = ()
    no_deps: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Of everything that decides what is installed."""
        content = {key: value for key, value in asdict(self).items() if key not in ("name", "summary")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def command(self) -> str:
        """What a user types to make it."""
        return f"infermix env create {self.name}"
