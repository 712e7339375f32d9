"""Replay of a trace: its arrivals, its lengths, its shared prefixes; the tokens are made up."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from random import Random

from infermix.errors import UserError
from infermix.roles.workload import WorkloadContext
from infermix.workload.assemble import Prompt, stream
from infermix.workload.synthetic import ordinary_tokens
from infermix.workload.trace_components import TraceOptions
from infermix.workload.trace_files import Row, read_trace

#: Resolution of the clock of Mooncake's conversation trace, whose times may be off by a millisecond.
MOONCAKE_TICK_S, TICK_ERROR_S = 3.0, 0.0011


class TraceSource:
    """Every round replays the same requests; with `vary` their tokens and places inside a tick differ.

    Raises `UserError` for bad rows and requests beyond the limits, unless the options say otherwise: then `counts`
    has their number.
    """

    def __init__(self, options: TraceOptions, context: WorkloadContext) -> None:
        trace = read_trace(options, context.base)
        self.counts = trace.counts
        self._options, self._ordinary = options, list(ordinary_tokens(context))
        self._block = _scaled(options.block_tokens, options.length_scale)
        self._path = str(trace.path)
        self._rows = self._fitting(trace.rows, context.max_model_len)
        self._tick_s = options.tick_s if options.tick_s is not None else _tick_s(trace.format, trace.rows)
        lengths = [row.input_tokens for row in self._rows]
        self.input_tokens = (min(lengths), max(lengths))
        self._last: tuple[tuple[int, int], list[Prompt]] | None = None
        self.counts |= {"requests": float(self._num_prompts), "tick_s": self._tick_s}

    @property
    def _num_prompts(self) -> int:
        return min(self._options.num_requests or sys.maxsize, len(self._rows) * self._options.copies)

    def prompts(self, round_: int, seed: int) -> Sequence[Prompt]:
        if self._last is None or self._last[0] != (round_, seed):  # long traces take seconds to fill with tokens
            self._last = ((round_, seed), self._make(round_, seed))
        return self._last[1]

    def _make(self, round_: int, seed: int) -> list[Prompt]:
        tokens = stream(seed, round_, "prompts")
        blocks: dict[int, tuple[int, ...]] = {}
        times = self._times(stream(seed, round_, "ticks"))
        first = [
            Prompt(self._prompt(row, tokens, blocks, f"{seed}/{round_}"), row.output_tokens, row.category, time)
            for row, time in zip(self._rows, times, strict=True)
        ]
        return list(islice(self._copies(first), self._num_prompts))

    def _copies(self, first: Sequence[Prompt]) -> Iterator[Prompt]:
        """The next copy begins a mean gap after the last arrival of the one before."""
        end_s = float(first[-1].arrival_s or 0.0)
        period_s = end_s + end_s / max(1, len(first) - 1)
        yield from first
        for copy in range(1, self._options.copies):
            for prompt in first:
                yield replace(prompt, arrival_s=(prompt.arrival_s or 0.0) + copy * period_s, salt=f"copy {copy}")

    def _times(self, random: Random) -> list[float]:
        """Seconds from the first arrival; arrivals of one tick at uniform places in it, in the order of the rows."""
        times = [row.time_s for row in self._rows]
        if self._tick_s:
            spread: list[float] = []
            for tick, group in groupby(times, key=lambda time: round(time / self._tick_s)):
                places = sorted(random.random() for _ in group)
                spread += [(tick + place) * self._tick_s for place in places]
            times = spread
        return [(time - times[0]) / self._options.speed for time in times]

    def _prompt(self, row: Row, tokens: Random, blocks: dict[int, tuple[int, ...]], salt: str) -> tuple[int, ...]:
        """Random tokens; equal hash ids have equal ones, whatever else the trace holds."""
        if not row.hash_ids:
            return tuple(tokens.choices(self._ordinary, k=row.input_tokens))
        for each in row.hash_ids:
            if each not in blocks:
                blocks[each] = tuple(Random(f"infermix/{salt}/block/{each}").choices(self._ordinary, k=self._block))
        joined = [token for each in row.hash_ids for token in blocks[each]]
        return tuple(joined[: row.input_tokens])

    def _fitting(self, rows: Sequence[Row], max_model_len: int) -> list[Row]:
        """The first `num_requests` rows, scaled, and within the limits."""
        fitting: list[Row] = []
        for row in rows:
            fitted = self._fit(self._scale(row), max_model_len)
            if fitted is not None:
                fitting.append(fitted)
            if len(fitting) == self._options.num_requests:
                break
        if not fitting:
            raise UserError("every request of this trace is too long", where=self._path, key="workload.too_long")
        return fitting

    def _scale(self, row: Row) -> Row:
        factor = self._options.length_scale
        if factor == 1:
            return row
        whole, rest = divmod(row.input_tokens, self._options.block_tokens)
        inputs = _scaled(row.input_tokens, factor)
        if row.hash_ids:  # whole blocks stay whole, so that what is shared stays shared
            inputs = whole * self._block + (_scaled(rest, factor) if rest else 0)
        return replace(row, input_tokens=inputs, output_tokens=_scaled(row.output_tokens, factor))

    def _fit(self, row: Row, max_model_len: int) -> Row | None:
        options = self._options
        outputs = min(row.output_tokens, options.max_output_tokens or row.output_tokens, max_model_len - 1)
        inputs = min(row.input_tokens, options.max_input_tokens or row.input_tokens, max_model_len - outputs)
        if (inputs, outputs) == (row.input_tokens, row.output_tokens):
            return row
        if options.too_long == "refuse":
            raise UserError(
                f"{row.input_tokens} prompt and {row.output_tokens} output tokens are too long: "
                f"{_limits(options, max_model_len)}",
                where=f"{self._path}:{row.line}",
                key="workload.too_long",
                hint="too_long: clip shortens such requests, skip leaves them out; both are counted",
            )
        if options.too_long == "skip":
            self._count("too_long_skipped")
            return None
        self._count("clipped_inputs", inputs < row.input_tokens)
        self._count("clipped_outputs", outputs < row.output_tokens)
        return replace(row, input_tokens=inputs, output_tokens=outputs)

    def _count(self, name: str, more: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + more


def _limits(options: TraceOptions, max_model_len: int) -> str:
    limits = [("max_input_tokens", options.max_input_tokens), ("max_output_tokens", options.max_output_tokens)]
    told = [f"{name} is {value}" for name, value in limits if value is not None]
    return ", ".join([*told, f"a sequence of this model may have {max_model_len}"])


def _scaled(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def _tick_s(format_: str, rows: Sequence[Row]) -> float:
    """3 s where every time is that of a tick, as in Mooncake's conversation trace but not in its synthetic one."""
    if format_ != "mooncake":
        return 0.0
    off = [abs(row.time_s - MOONCAKE_TICK_S * round(row.time_s / MOONCAKE_TICK_S)) for row in rows]
    return MOONCAKE_TICK_S if max(off) <= TICK_ERROR_S else 0.0
