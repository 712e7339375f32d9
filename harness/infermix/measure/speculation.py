"""What drafting brought, from the counters of a decoder that drafts.

The counters of one repeat (`toolkit.verification.AcceptanceCounters`): `verifications` are the rows that target
forwards ended with tokens (one per sequence and forward, prompts included), `verified_tokens` what they emitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

#: Unit and direction of each figure. `acceptance_rate_at_N` is the share of the drafts at position N (from 1) that
#: stayed, those behind a rejected one counted as rejected.
SPECULATION_METRICS: Mapping[str, tuple[str, Literal["higher", "lower", "none"]]] = {
    "acceptance_rate": ("", "higher"),
    "mean_acceptance_length": ("tokens", "higher"),
    "tokens_per_target_forward": ("tokens", "higher"),
    "draft_tokens_per_verification": ("tokens", "none"),
    "draft_forwards_per_target_forward": ("", "none"),
    "draft_time_share": ("", "lower"),
}

#: Of these also one figure per category of requests, named `NAME[CATEGORY]`.
CATEGORY_METRICS = ("acceptance_rate", "mean_acceptance_length")

_RATIOS = {
    "acceptance_rate": ("accepted_draft_tokens", "draft_tokens"),
    "mean_acceptance_length": ("verified_tokens", "verifications"),
    "tokens_per_target_forward": ("verified_tokens", "target_forwards"),
    "draft_tokens_per_verification": ("draft_tokens", "verifications"),
    "draft_forwards_per_target_forward": ("draft_forwards", "target_forwards"),
}
_AT = re.compile(r"drafted_at_(\d+)")
#: What `of_category` adds to a name.
_CATEGORY = re.compile(r"\[.+\]$")


def speculation(counters: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """The figures of one repeat; empty for a decoder that counts no verifications.

    Acceptance rate: accepted over proposed drafts. Mean acceptance length: tokens per sequence and target forward,
    the bonus token included. `draft_time_share`: seconds spent drafting (until the drafts were read) over `wall_s`.
    """
    if "verifications" not in counters:
        return {}
    figures = {
        name: counters[a] / counters[b] for name, (a, b) in _RATIOS.items() if a in counters and counters.get(b)
    }
    for position in sorted(int(found[1]) for name in counters if (found := _AT.fullmatch(name))):
        if drafted := counters[f"drafted_at_{position}"]:
            figures[f"acceptance_rate_at_{position}"] = counters[f"accepted_at_{position}"] / drafted
    for name in counters:
        if name.startswith("verifications["):
            figures |= _of_category(counters, name.partition("[")[2].removesuffix("]"))
    if "draft_s" in counters and wall_s > 0:
        figures["draft_time_share"] = counters["draft_s"] / wall_s
    return figures


def of_category(name: str, category: str) -> str:
    """The name of a metric or counter over the requests of one category."""
    return f"{name}[{category}]"


def _of_category(counters: Mapping[str, float], category: str) -> dict[str, float]:
    figures = {}
    for name in CATEGORY_METRICS:
        parts, whole = (of_category(each, category) for each in _RATIOS[name])
        if counters.get(whole):
            figures[of_category(name, category)] = counters[parts] / counters[whole]
    return figures


def speculation_metric(name: str) -> tuple[str, Literal["higher", "lower", "none"]] | None:
    """Unit and direction; `None` for a metric that is not one of these."""
    return SPECULATION_METRICS.get(re.sub(r"^(acceptance_rate)_at_\d+$", r"\1", _CATEGORY.sub("", name)))
