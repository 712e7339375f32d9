"""The leaderboard as data: records in, one ranked table per track out. Knows nothing of files or formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from infermix.measure.denoising import DENOISING_METRICS
from infermix.measure.speculation import SPECULATION_METRICS
from infermix.record.record import Summary
from infermix.record.track import track_id, track_title
from infermix.report.conditions import cautions, conditions
from infermix.report.effects import Effects, effects
from infermix.report.labels import ABSENT, MIX_COLUMNS, concerns, mixes, notes
from infermix.report.ranking import Figure, Rank, figure, paired_ratio, ranks, ratio

SPEED = "output_tokens_per_s"
METRIC_KEYS = (
    SPEED,
    "total_tokens_per_s",
    "requests_per_s",
    "goodput_rps",
    "ttft_s_p50",
    "ttft_s_p99",
    "tpot_s_p50",
    "tpot_s_p99",
    "itl_s_p50",
    "itl_s_p99",
    "e2e_s_p50",
    "e2e_s_p99",
    "failed_share",
)
#: Of decoders that draft, of those that fill in masks, of prefix caches, of layouts that drop tokens, and of
#: preemption by swapping: no column where no row has them.
SPECIAL_KEYS = (
    *SPECULATION_METRICS, *DENOISING_METRICS, "prefix_hit_rate", "prefix_hit_tokens", "kv_kept_fraction",
    "kv_dropped_tokens", "preemptions", "swap_stall_s", "swap_out_bytes_per_s", "swap_in_bytes_per_s",
)  # fmt: skip
MEMORY_KEYS = ("peak_bytes", "weight_bytes", "kv_bytes", "kv_bytes_per_token", "kv_allocated_bytes_per_token")
ROOFLINE_KEYS = ("mbu", "mfu")


@dataclass(frozen=True)
class Row:
    """One cell. Only `ok` rows have a rank and figures of speed; a `wrong` row publishes none."""

    record: Summary
    mix: Mapping[str, str]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    rank: Rank | None = None
    is_baseline: bool = False
    superseded: int = 0

    @property
    def notes(self) -> list[str]:
        return notes(self.record)

    @property
    def concerns(self) -> list[str]:
        return concerns(self.record)

    @property
    def limit(self) -> str:
        """Which hardware limit binds (`memory`, `compute`, ...); empty when unknown or not published."""
        return str(self.record.roofline.get("binds") or "") if self.rank else ""


@dataclass(frozen=True)
class Table:
    """One track. `mix_columns` are those that differ between rows; the others are among `conditions`."""

    track: str
    title: str
    conditions: Sequence[tuple[str, str]]
    cautions: Sequence[str]
    mix_columns: Sequence[str]
    quality_names: Sequence[str]
    rows: Sequence[Row]
    effects: Effects | None = None


@dataclass(frozen=True)
class Board:
    """All tracks, by title. `unfinished` counts records that are not complete and take no part."""

    tables: Sequence[Table]
    unfinished: int = 0
    warnings: Sequence[str] = ()


def build_board(records: Iterable[Summary], warnings: Sequence[str] = ()) -> Board:
    """Group by track, keep the latest complete record of each cell, rank. The same records give the same
    board.
    """
    everything = list(records)
    tracks: dict[str, list[Summary]] = {}
    for record in everything:
        if record.complete:
            tracks.setdefault(record.track or track_id(record), []).append(record)
    tables = [_table(track, members) for track, members in tracks.items()]
    tables.sort(key=lambda table: (table.title, table.track))
    return Board(tables, sum(not record.complete for record in everything), tuple(warnings))


def _table(track: str, records: Sequence[Summary]) -> Table:
    cells = _latest(records)
    latest = [history[-1] for history in cells]
    labels = mixes(latest)
    rows = [Row(history[-1], mix, superseded=len(history) - 1) for history, mix in zip(cells, labels, strict=True)]
    rows = _with_figures(rows, _baselines(cells))
    labels_of = {column: {row.mix[column] for row in rows} - {ABSENT} for column in MIX_COLUMNS}
    shared = {column: next(iter(found)) for column, found in labels_of.items() if len(found) == 1}
    shared.pop("settings", None)
    ordered = _ordered(rows)
    return Table(
        track=track,
        title=track_title(latest[-1]),
        conditions=conditions(latest, shared, sum(row.superseded for row in rows)),
        cautions=cautions(latest),
        mix_columns=[column for column, found in labels_of.items() if found and column not in shared],
        quality_names=_quality_names(latest),
        rows=ordered,
        effects=effects([(row.record, row.mix) for row in ordered if row.rank], SPEED),
    )


def _latest(records: Sequence[Summary]) -> list[list[Summary]]:
    """Per cell its complete records, oldest first; cells in order of their digest."""
    cells: dict[str, list[Summary]] = {}
    for record in sorted(records, key=lambda record: (record.created, record.run_id)):
        cells.setdefault(record.cell_digest, []).append(record)
    return [cells[digest] for digest in sorted(cells)]


def _baselines(cells: Sequence[Sequence[Summary]]) -> dict[str, set[str]]:
    """Cell digest -> names of the experiments that it is the baseline of (any of its records may say so)."""
    found: dict[str, set[str]] = {}
    for history in cells:
        names = {record.experiment_name for record in history if record.baseline}
        if names:
            found[history[-1].cell_digest] = names
    return found


def _with_figures(rows: Sequence[Row], baselines: Mapping[str, set[str]]) -> list[Row]:
    usable = {row.record.cell_digest: row.record for row in rows if row.record.state == "ok"}
    finished = []
    for row in rows:
        base = _baseline_of(row.record, baselines)
        finished.append(
            Row(
                record=row.record,
                mix=row.mix,
                figures=_figures(row.record, usable.get(base or "")),
                is_baseline=row.record.cell_digest in baselines,
                superseded=row.superseded,
            )
        )
    return finished


def _baseline_of(record: Summary, baselines: Mapping[str, set[str]]) -> str | None:
    """The baseline of the row's own experiment, or the only one of the table."""
    own = [digest for digest, names in baselines.items() if record.experiment_name in names]
    candidates = own or list(baselines)
    return candidates[0] if len(candidates) == 1 else None


def _figures(record: Summary, baseline: Summary | None) -> dict[str, Figure]:
    found = _quality(record)
    if record.state != "ok":
        return found
    found |= {
        key: shown for key in (*METRIC_KEYS, *SPECIAL_KEYS) if (shown := figure(record.metrics.get(key))) is not None
    }
    found |= {key: Figure(record.memory[key]) for key in MEMORY_KEYS if key in record.memory}
    if "kv_bytes_per_token" in found:  # of an engine that does not say what it allocated
        found.setdefault("kv_allocated_bytes_per_token", found["kv_bytes_per_token"])
    found |= {
        key: Figure(float(record.roofline[key]))
        for key in ROOFLINE_KEYS
        if isinstance(record.roofline.get(key), int | float)
    }
    quantizer = record.parts.get("quantizer")
    bits = quantizer.executed.get("bits_per_weight") if quantizer else None
    if isinstance(bits, int | float):
        found["bits_per_weight"] = Figure(float(bits))
    seconds = _quantize_seconds(record)
    if seconds is not None:
        found["quantize_s"] = Figure(seconds)
    if baseline is not None:
        relative = _ratio(record, baseline)
        found |= {"ratio": relative} if relative else {}
    return found


def _quantize_seconds(record: Summary) -> float | None:
    """As the quantizer says, which knows what an earlier run took; else the phase; `None` where there is none."""
    quantizer = record.parts.get("quantizer")
    if quantizer is None or not quantizer.executed.get("quantized_bytes"):
        return None
    seconds = quantizer.executed.get("quantize_s", record.phases_s.get("engine.quantize"))
    return float(seconds) if isinstance(seconds, int | float) else None


def _ratio(record: Summary, baseline: Summary) -> Figure | None:
    """Speed over the baseline's: from turns where they were taken; exactly 1 for the baseline itself."""
    if record is baseline:
        return Figure(1.0) if SPEED in record.metrics else None
    return paired_ratio(record, baseline, SPEED) or ratio(record.metrics.get(SPEED), baseline.metrics.get(SPEED))


def _quality(record: Summary) -> dict[str, Figure]:
    """Quality is shown for `wrong` rows too: it is why they are wrong."""
    if record.state not in ("ok", "wrong"):
        return {}
    return {f"quality:{name}": Figure(quality.value) for name, quality in record.quality.items()}


def _quality_names(records: Sequence[Summary]) -> list[str]:
    """Names of every quality metric, perplexities first."""
    names = {name for record in records for name in record.quality}
    return sorted(names, key=lambda name: (not name.startswith("perplexity"), name))


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Ranked rows best first, then the ok rows without a speed, then the others by state."""
    ranked = sorted(
        (row for row in rows if SPEED in row.figures),
        key=lambda row: (-row.figures[SPEED].value, row.record.cell_digest),
    )
    places = ranks([row.figures[SPEED] for row in ranked])
    rest = sorted(
        (row for row in rows if SPEED not in row.figures),
        key=lambda row: (row.record.state != "ok", row.record.state, row.record.cell, row.record.cell_digest),
    )
    return [_ranked(row, place) for row, place in zip(ranked, places, strict=True)] + rest


def _ranked(row: Row, rank: Rank) -> Row:
    return Row(row.record, row.mix, row.figures, rank, row.is_baseline, row.superseded)
