"""The columns of a leaderboard table, once for every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infermix.report import render
from infermix.report.board import SPEED, Row, Table
from infermix.report.ranking import Figure


@dataclass(frozen=True)
class Column:
    """A figure of a row. `kind` picks the format in `render`; `help` is the sentence behind the header."""

    key: str
    header: str
    kind: str
    help: str
    with_interval: bool = False

    def value(self, row: Row) -> Figure | None:
        return row.figures.get(self.key)

    def text(self, row: Row) -> str:
        found = self.value(row)
        if found is None:
            return ""
        return render.interval(found, self.kind) if self.with_interval else render.FORMATS[self.kind](found.value)


FIGURES = (
    Column(
        SPEED,
        "output tok/s",
        "number",
        "Output tokens per second, geometric mean [95 % interval over repeats, on logarithms]",
        True,
    ),
    Column("ratio", "vs baseline", "ratio", "Output tokens per second divided by the baseline's", True),
    Column("requests_per_s", "req/s", "number", "Finished requests per second"),
    Column("goodput_rps", "goodput req/s", "number", "Requests per second that met the stated limits"),
    Column("ttft_s_p50", "TTFT p50", "s", "Arrival to first output token, median, queueing included"),
    Column("ttft_s_p99", "TTFT p99", "s", "Arrival to first output token, 99th percentile"),
    Column("tpot_s_p50", "TPOT p50", "s", "Time per output token after the first, median over requests"),
    Column("tpot_s_p99", "TPOT p99", "s", "Time per output token after the first, 99th percentile"),
    Column("itl_s_p50", "ITL p50", "s", "Gap between emissions, median over all gaps"),
    Column("itl_s_p99", "ITL p99", "s", "Gap between emissions, 99th percentile over all gaps"),
    Column("acceptance_rate", "accepted", "share", "Accepted over proposed draft tokens"),
    Column(
        "mean_acceptance_length",
        "tok/verification",
        "number",
        "Tokens per sequence and target forward, the bonus token included",
    ),
    Column("draft_time_share", "drafting", "share", "Share of the wall time spent on drafting"),
    Column("peak_bytes", "peak memory", "bytes", "Peak memory of the cell"),
    Column("kv_bytes", "KV", "bytes", "Bytes of KV memory as allocated"),
    Column(
        "kv_allocated_bytes_per_token",
        "KV/token",
        "bytes",
        "KV bytes allocated for a sequence of the longest length, over its tokens",
    ),
    Column("kv_bytes_per_token", "KV slot", "bytes", "KV bytes of one more token in all layers"),
    Column("prefix_hit_rate", "prefix hits", "share", "Prompt tokens that came from the prefix cache"),
    Column(
        "kv_kept_fraction", "KV kept", "share", "Tokens in the cache when their sequences ended; the rest was dropped"
    ),
    Column("preemptions", "preempted", "number", "Preemptions per repeat"),
    Column("swap_stall_s", "swap stall", "s", "Time that steps of a repeat waited for swapped blocks"),
    Column("swap_out_bytes_per_s", "swap out/s", "bytes", "Bytes per second moved to host memory"),
    Column("swap_in_bytes_per_s", "swap in/s", "bytes", "Bytes per second moved back"),
    Column("weight_bytes", "weights", "bytes", "Bytes of the weights as held"),
    Column("bits_per_weight", "bits/w", "number", "Effective bits per quantized weight, scales included"),
    Column("quantize_s", "quantizing", "s", "Time that quantizing the weights took, also where the result was kept"),
    Column("mbu", "MBU", "share", "Achieved bytes/s over the measured ceiling of this machine"),
    Column("mfu", "MFU", "share", "Achieved FLOP/s over the measured ceiling of this machine"),
)
#: Left out of Markdown, where width is scarce.
WIDE_ONLY = frozenset({"requests_per_s", "goodput_rps", "itl_s_p99", "kv_bytes", "kv_bytes_per_token"})


def figure_columns(table: Table) -> list[Column]:
    """Columns that hold a figure in at least one row of `table`, in the fixed order."""
    present = {key for row in table.rows for key in row.figures}
    return [column for column in FIGURES if column.key in present]


def quality_columns(table: Table) -> list[Column]:
    """One column per quality metric, headed by its name without the protocol."""
    return [
        Column(f"quality:{name}", _short(name, table.quality_names), "number", name) for name in table.quality_names
    ]


def _short(name: str, names: Sequence[str]) -> str:
    """`perplexity` for `perplexity[...]`, numbered where several metrics would look the same."""
    stem = _stem(name)
    same = [other for other in names if _stem(other) == stem]
    return stem if len(same) == 1 else f"{stem} {same.index(name) + 1}"


def _stem(name: str) -> str:
    for opening in "[({:@":
        name = name.partition(opening)[0]
    return name.strip()
