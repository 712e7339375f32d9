"""Sweeps: grid, zip, include, exclude, baseline, names and digests of cells."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from infermix.errors import UserError
from infermix.spec.experiment import Cell
from infermix.spec.load import Sweep, load_experiment

HEAD = "model: m\nworkload: {use: w, path: prompts.jsonl}\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)

    def of(text: str) -> Sweep:
        Path("x.yaml").write_text(HEAD + text, encoding="utf-8")
        return load_experiment("x.yaml")

    return of


def names(cells: Sweep) -> list[str]:
    return [cell.name for cell in cells]


def faults(load, text: str) -> list[str]:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        load(text)
    return str(caught.value).splitlines()


def test_a_grid_is_every_combination_in_the_order_of_the_file(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("sweep:\n  parts.attention: [eager, sdpa]\n  parts.kv: [dense, {use: paged, block_size: 16}]\n")
    assert names(cells) == [
        "attention=eager,kv=dense",
        "attention=eager,kv=paged[block_size=16]",
        "attention=sdpa,kv=dense",
        "attention=sdpa,kv=paged[block_size=16]",
    ]
    assert [cell.index for cell in cells] == [0, 1, 2, 3]
    assert cells[3].overrides == {"parts.attention": "sdpa", "parts.kv": {"use": "paged", "block_size": 16}}
    assert cells[3].experiment.parts["kv"].options == {"block_size": 16}
    assert len({cell.digest for cell in cells}) == 4


def test_zip_varies_together(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("sweep:\n  parts.kv: [a, b]\n  zip: {seed: [1, 2], measure.repeats: [3, 3]}\n")
    assert names(cells) == [f"kv={kv},seed={seed},repeats=3" for kv in "ab" for seed in (1, 2)]


def test_several_zips_multiply(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("sweep:\n  zip:\n    - {seed: [1, 2]}\n    - {dtype: [float32, bfloat16], device: [cpu, cuda]}\n")
    assert [(c.experiment.seed, c.experiment.dtype, c.experiment.device) for c in cells] == [
        (1, "float32", "cpu"),
        (1, "bfloat16", "cuda"),
        (2, "float32", "cpu"),
        (2, "bfloat16", "cuda"),
    ]


def test_include_adds_points_over_the_rest_of_the_file(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("seed: 5\nsweep:\n  parts.kv: [a]\n  include: [{engine: transformers}, {parts.kv: a}, {seed: 6}]\n")
    assert names(cells) == ["kv=a", "engine=transformers", "seed=6"], "a repeated point is one cell"
    assert (cells[1].experiment.parts, cells[1].experiment.seed) == ({}, 5)


def test_include_alone_is_a_sweep(load) -> None:  # type: ignore[no-untyped-def]
    assert names(load("sweep: {include: [{seed: 1}, {quality: []}]}\n")) == ["seed=1", "quality=none"]


def test_evaluators_that_go_with_another_axis_are_not_named(load) -> None:  # type: ignore[no-untyped-def]
    quality = "quality: [[], [{use: a, n: 1}]]"
    assert names(load(f"sweep: {{zip: {{seed: [1, 2], {quality}}}}}\n")) == ["seed=1", "seed=2"]
    assert names(load(f"sweep: {{{quality}}}\n")) == ["quality=none", "quality=a[n=1]"]


def test_exclude_drops_partial_matches(load) -> None:  # type: ignore[no-untyped-def]
    text = "sweep:\n  parts.attention: [a, b]\n  parts.kv: [c, d, {use: d, n: 1}]\n"
    assert len(load(text + "  exclude: [{parts.attention: a}]\n")) == 3
    left = load(text + "  exclude: [{parts.attention: a, parts.kv: d}]\n")
    assert len(left) == 5, "a name that is swept on its own means only that"
    assert len(load(text.replace("d, {", "{") + "  exclude: [{parts.kv: d}]\n")) == 2, "otherwise any options"


def test_values_replace_what_the_file_says(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("parts: {kv: {use: paged, block_size: 8}}\nsweep: {parts.kv: [paged, dense]}\n")
    assert [cell.experiment.parts["kv"].options for cell in cells] == [{}, {}]


def test_single_options_are_swept_on_top(load) -> None:  # type: ignore[no-untyped-def]
    cells = load(
        "parts: {kv: {use: paged, a: 1}}\nsweep: {parts.kv.block_size: [8, 16], workload.arrivals.rate: [2]}\n"
    )
    assert [cell.experiment.parts["kv"].options for cell in cells] == [{"a": 1, "block_size": n} for n in (8, 16)]
    assert cells[0].experiment.workload.options["arrivals"] == {"rate": 2}
    assert names(cells)[0] == "block_size=8,rate=2"


def test_options_of_a_swept_component_combine_with_it(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("sweep: {parts.kv.block_size: [8, 16], parts.kv: [{use: paged, a: 1}]}\n")
    assert [cell.experiment.parts["kv"].options for cell in cells] == [{"a": 1, "block_size": n} for n in (8, 16)]


def test_whole_sections_and_models_are_values(load) -> None:  # type: ignore[no-untyped-def]
    cells = load(
        "sweep:\n  model: [org/one, {source: c.json, weights: dummy}]\n  measure: [{repeats: 1}, {warmup: 0}]\n"
        "  quality: [[p], [p, {use: q, n: 1}]]\n"
    )
    assert names(cells)[0] == "model=one,measure=[repeats=1],quality=p"
    assert names(cells)[-1] == "model=c.json[weights=dummy],measure=[warmup=0],quality=p+q[n=1]"
    assert cells[0].experiment.measure.repeats == 1


def test_labels_are_as_long_as_they_must_be(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("sweep: {workload.n: [1], parts.kv.n: [2]}\n")
    assert names(cells) == ["workload.n=1,parts.kv.n=2"]


def test_equal_names_are_told_apart(load) -> None:  # type: ignore[no-untyped-def]
    first, second = names(load("sweep: {model: [a/x, b/x]}\n"))
    assert first.startswith("model=x~")
    assert first != second


def test_baseline_marks_its_cells(load) -> None:  # type: ignore[no-untyped-def]
    text = "sweep: {model: [m, n], parts.kv: [dense, paged]}\n"
    cells = load(text + "baseline: {parts.kv: dense}\n")
    assert [cell.baseline for cell in cells] == [True, False, True, False], "one per model"
    assert cells[0].experiment.baseline == {"parts.kv": "dense"}
    assert not any(cell.baseline for cell in load(text))


def test_baseline_by_a_default_part(load) -> None:  # type: ignore[no-untyped-def]
    cells = load(
        "sweep: {parts.kv: [dense, paged], include: [{engine: transformers}]}\n"
        "baseline: {parts.attention: sdpa, parts.kv: paged}\n"
    )
    assert [cell.baseline for cell in cells] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("sweep: {}\n", ["x.yaml:3:8: sweep: the sweep expands to nothing"]),
        ("sweep: {parts.kv: []}\n", ["x.yaml:3:19: sweep.parts.kv: is an empty list"]),
        ("sweep: [a]\n", ["x.yaml:3:8: sweep: expected a mapping of paths to lists"]),
        ("sweep: {parts.kv: a}\n", ["x.yaml:3:19: sweep.parts.kv: expected a list of values, got 'a'"]),
        (
            "sweep:\n  parts.attenton: [a]\n  measure.repeets: [1]\n  name: [a]\n  limits.max_cells: [3]\n"
            "  seed.x: [1]\n",
            [
                "x.yaml:4:3: sweep.parts.attenton: no such path in an experiment (did you mean 'parts.attention'?",
                "x.yaml:5:3: sweep.measure.repeets: no such path in an experiment (did you mean 'measure.repeats'?",
                "x.yaml:6:3: sweep.name: no such path in an experiment",
                "x.yaml:7:3: sweep.limits.max_cells: no such path in an experiment",
                "x.yaml:8:3: sweep.seed.x: no such path in an experiment (did you mean 'seed'?",
            ],
        ),
        (
            "sweep: {seed: [1, x], dtype: [float32, float23], measure.repeats: [0]}\n",
            [
                "x.yaml:3:19: sweep.seed[1]: expected int, got 'x'",
                "x.yaml:3:40: sweep.dtype[1]: expected one of the known values, got 'float23' (did you mean ",
                "x.yaml:3:68: sweep.measure.repeats[0]: expected int >= 1, got 0",
            ],
        ),
        ("sweep: {seed: [1, 2, 1]}\n", ["x.yaml:3:22: sweep.seed[2]: 1 is listed twice"]),
        (
            "sweep: {zip: {seed: [1, 2], dtype: [float32]}}\n",
            ["x.yaml:3:14: sweep.zip: the lists differ in length: seed has 2, dtype has 1"],
        ),
        ("sweep: {seed: [1, 2], zip: {seed: [3]}}\n", ["x.yaml:3:28: sweep.zip: seed is varied twice"]),
        ("sweep: {seed: [1], include: {seed: 3}}\n", ["x.yaml:3:29: sweep.include: expected a list of mappings"]),
        (
            "sweep: {seed: [1], exclude: [{seed: 3}]}\n",
            ["x.yaml:3:37: sweep.exclude[0].seed: no cell has 3 here (the cells have: 1)"],
        ),
        (
            "sweep: {seed: [1, 2], exclude: [{seed: 1}, {seed: 2}]}\n",
            ["x.yaml:3:8: sweep: the sweep expands to nothing: 2 cells, 2 excluded"],
        ),
        (
            "sweep: {parts.kv: [a, b]}\nbaseline: {parts.kv: c}\n",
            ["x.yaml:4:22: baseline.parts.kv: no cell has 'c' here (the cells have: a, b)"],
        ),
        (
            "sweep: {zip: {parts.kv: [a, b], seed: [1, 2]}}\nbaseline: {parts.kv: a, seed: 2}\n",
            ["x.yaml:4:11: baseline: no cell has all of parts.kv: 'a', seed: 2"],
        ),
        ("baseline: {parts.kvv: c}\n", ["x.yaml:3:12: baseline.parts.kvv: no such path in an experiment"]),
        (
            "limits: {max_cells: 5}\nsweep: {seed: [1, 2, 3], dtype: [float32, float16]}\n",
            ["x.yaml:4:8: sweep: the sweep expands to 6 cells, more than limits.max_cells (5)"],
        ),
        (
            "sweep: {" + ", ".join(f"workload.o{i}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for i in range(9)) + "}\n",
            ["x.yaml:3:8: sweep: the sweep expands to 1000000000 cells, more than limits.max_cells (1000)"],
        ),
    ],
)
def test_faults(load, text: str, messages: list[str]) -> None:  # type: ignore[no-untyped-def]
    found = faults(load, text)
    assert len(found) == len(messages), found
    for line, message in zip(found, messages, strict=True):
        assert line.startswith(message)


def test_values_know_their_place(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("parts:\n  attention: sdpa\nsweep:\n  parts.kv: [dense, {use: paged, block_size: 16}]\n")
    assert cells.locate(cells[1], ("parts", "kv", "block_size")) == "x.yaml:6:46"
    assert cells.locate(cells[1], ("parts", "kv", "block_size"), key=True) == "x.yaml:6:34"
    assert cells.locate(cells[1], ("parts", "attention", "use")) == "x.yaml:4:14"
    assert cells.only("kv=paged*").locate(cells.only("kv=paged*")[0], ("parts", "kv", "use")) == "x.yaml:6:27"


def test_cells_are_picked_by_glob(load) -> None:  # type: ignore[no-untyped-def]
    cells = load("sweep: {parts.attention: [a, b], parts.kv: [c, {use: d, n: 1}]}\n")
    assert names(cells.only("*kv=d*")) == ["attention=a,kv=d[n=1]", "attention=b,kv=d[n=1]"]
    assert names(cells.only("attention=a,kv=d[n=1]")) == ["attention=a,kv=d[n=1]"]
    assert names(cells.only("*d[n=?]")) == ["attention=a,kv=d[n=1]", "attention=b,kv=d[n=1]"]
    with pytest.raises(UserError, match=r"--only: no cell matches 'x' \(the cells are: attention=a,kv=c, "):
        cells.only("x")


def test_digests_ignore_what_cannot_change_a_result(load) -> None:  # type: ignore[no-untyped-def]
    plain = load("seed: 0\n")[0].digest
    assert (
        load("name: other\nlimits: {max_cells: 3}\nbaseline: {seed: 0}\nparts: {attention: sdpa}\n")[0].digest
        == plain
    )
    assert load("seed: 1\n")[0].digest != plain
    assert load("measure: {repeats: 9}\n")[0].digest != plain


def test_digests_follow_the_content_of_data_and_weights(load) -> None:  # type: ignore[no-untyped-def]
    def digest(prompts: str, weights: str) -> str:
        Path("prompts.jsonl").write_text(prompts)
        Path("m").mkdir(exist_ok=True)
        Path("m/model.safetensors").write_text(weights)
        return load("")[0].digest

    assert digest("a", "w") == digest("a", "w")
    assert len({digest("a", "w"), digest("b", "w"), digest("a", "v")}) == 3


def test_cells_survive_json(load) -> None:  # type: ignore[no-untyped-def]
    cell = load("sweep: {parts.kv: [{use: paged, n: [1, 2]}]}\nbaseline: {parts.kv: paged}\n")[0]
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell) == cell


def test_a_thousand_cells_expand_quickly(load) -> None:  # type: ignore[no-untyped-def]
    values = ", ".join(map(str, range(10)))
    text = f"sweep: {{seed: [{values}], workload.a: [{values}], workload.b: [{values}]}}\nbaseline: {{seed: 0}}\n"
    start = time.process_time()
    assert len(load(text)) == 1000
    assert time.process_time() - start < 0.7
