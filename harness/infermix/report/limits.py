"""`--fail-if` expressions: when a difference is bad enough to fail a build."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infermix.errors import UserError
from infermix.report.compare import Difference

EXPRESSION = re.compile(r"\s*(?P<metric>[^<>]+?)\s*(?P<sign>[<>])\s*(?P<percent>[+-]?\d+(?:\.\d+)?)\s*%\s*")
EXAMPLE = "write METRIC<-PERCENT% or METRIC>+PERCENT%, e.g. output_tokens_per_s<-5%"


@dataclass(frozen=True)
class FailIf:
    """`metric<-5%` fires when B is more than 5 % below A, `metric>+5%` when it is more than 5 % above.

    It fires only when the difference is also significant, i.e. its 95 % interval excludes zero; figures
    without an interval (memory, single repeats) are compared as they are.
    """

    text: str
    metric: str
    limit: float

    def fires(self, difference: Difference) -> bool:
        if difference.has_interval and not difference.significant:
            return False
        beyond = difference.relative < self.limit if self.limit_is_drop else difference.relative > self.limit
        return beyond

    @property
    def limit_is_drop(self) -> bool:
        return "<" in self.text


def parse_fail_if(text: str) -> FailIf:
    """Raises `UserError` for anything but a metric, `<` with a negative or `>` with a positive percentage."""
    found = EXPRESSION.fullmatch(text)
    if found is None:
        raise UserError(f"cannot read {text!r}", where="--fail-if", hint=EXAMPLE)
    percent = float(found["percent"])
    if percent and (found["sign"] == "<") != (percent < 0):
        raise UserError(f"{text!r} would hold for records that do not differ", where="--fail-if", hint=EXAMPLE)
    if found["percent"][0] not in "+-" and percent:
        raise UserError(f"the percentage in {text!r} needs its sign", where="--fail-if", hint=EXAMPLE)
    return FailIf(text.strip(), found["metric"], percent / 100)
