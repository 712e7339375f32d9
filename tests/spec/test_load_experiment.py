"""Reading experiment files: defaults, `extends`, `--set`, and every fault with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.errors import UserError
from infermix.spec.load import load_experiment

SMALL = "model: m\nworkload: w\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)

    def to(text: str, name: str = "x.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return to


def faults(path: str, *sets: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_experiment(path, sets)
    return str(caught.value).splitlines()


def test_two_lines_are_an_experiment(write) -> None:  # type: ignore[no-untyped-def]
    (cell,) = load_experiment(write(SMALL, "little.yaml"))
    experiment = cell.experiment
    assert (experiment.name, cell.name) == ("little", "little")
    assert (experiment.model.source, experiment.workload.name) == ("m", "w")
    assert (experiment.engine.name, experiment.parts, experiment.quality) == ("native", {}, ())
    assert (experiment.measure.repeats, experiment.limits.max_cells, experiment.dtype) == (3, 1000, "auto")
    assert len(cell.digest) == 64


def test_the_whole_shape(write) -> None:  # type: ignore[no-untyped-def]
    text = """
name: full
model: {source: org/model, revision: abc, config: {num_hidden_layers: 2}}
device: cpu
dtype: bfloat16
engine: {use: native, graphs: off}
parts: {attention: sdpa, kv: {use: paged, block_size: 32}, scheduler: {max_num_seqs: 4}}
workload: {use: prompts, path: p.jsonl, arrivals: {use: poisson, request_rate: 4}}
measure: {repeats: 5, goodput: {ttft_s: 0.5}}
limits: {kv_memory_bytes: 1000}
quality: [agreement, {use: perplexity, window: 8}]
seed: 7
"""
    experiment = load_experiment(write(text))[0].experiment
    assert experiment.model.config == {"num_hidden_layers": 2}
    assert experiment.engine.options == {"graphs": "off"}
    assert experiment.parts["kv"].options == {"block_size": 32}
    assert (experiment.parts["scheduler"].name, experiment.parts["scheduler"].options) == (
        "continuous",
        {"max_num_seqs": 4},
    )
    assert experiment.workload.options["arrivals"] == {"use": "poisson", "request_rate": 4}
    assert [use.name for use in experiment.quality] == ["agreement", "perplexity"]
    assert experiment.measure.goodput == {"ttft_s": 0.5}
    assert experiment.base == "."


def test_every_fault_at_once_with_line_and_nearest_name(write) -> None:  # type: ignore[no-untyped-def]
    text = """modle: x
dtype: bf16
parts:
  atention: sdpa
  kv: 3
measure: {repeats: 0, repeat: 3, goodput: {ttft_s: -1}}
limits: {max_cells: 1e3}
quality: perplexity
parallel: 2
seed: yes
"""
    found = faults(write(text))
    assert found[0].startswith("x.yaml:1:1: modle: unknown key (did you mean 'model'? known: baseline, ")
    assert found[1].startswith("x.yaml:2:8: dtype: expected one of the known values, got 'bf16' (did you mean '")
    assert found[2].startswith("x.yaml:4:3: parts.atention: unknown role (did you mean 'attention'?")
    assert found[3] == "x.yaml:5:7: parts.kv: expected a name or a mapping with `use`, got 3"
    assert found[4].startswith("x.yaml:6:23: measure.repeat: unknown key (did you mean 'repeats'?")
    assert found[5] == "x.yaml:6:20: measure.repeats: expected int >= 1, got 0"
    assert found[6] == "x.yaml:6:52: measure.goodput.ttft_s: expected float > 0.0, got -1"
    assert found[7] == "x.yaml:7:21: limits.max_cells: expected int, got 1000.0"
    assert found[8] == "x.yaml:8:10: quality: expected a list of evaluators, got 'perplexity'"
    assert found[9].startswith("x.yaml:9:1: parallel: is reserved")
    assert found[10] == "x.yaml:10:7: seed: expected int, got 'yes'"
    assert len(found) == 11


@pytest.mark.parametrize("missing", ["model", "workload"])
def test_missing_keys_are_named(write, missing: str) -> None:  # type: ignore[no-untyped-def]
    kept = "".join(line for line in SMALL.splitlines(keepends=True) if not line.startswith(missing))
    (text,) = faults(write(kept))
    assert text == f"x.yaml:1:1: {missing!r} is missing (every experiment needs model and workload)"


def test_a_missing_key_may_be_swept(write) -> None:  # type: ignore[no-untyped-def]
    cells = load_experiment(write("model: m\nsweep: {workload: [a, b]}\n"))
    assert [cell.experiment.workload.name for cell in cells] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.yaml: is empty"),
        (b"- a\n- b\n", "x.yaml: expected a mapping with keys such as `model`, got ['a', 'b']"),
        (b"model: \xff\n", "x.yaml: is not UTF-8 text (byte 7)"),
        (b"\xef\xbb\xbfmodle: m\n", "x.yaml:1:1: modle: unknown key"),
        (b"model: m\nworkload: w\nname: a/b\n", "x.yaml:3:7: name: 'a/b' is not a name"),
        (b"model: m\nworkload: w\nname: ../a\n", "x.yaml:3:7: name: '../a' is not a name"),
        (
            b"model: m\nworkload: w\nname: " + b"a" * 121 + b"\n",
            "x.yaml:3:7: name: has 121 characters (at most 120)",
        ),
        (b"model: m\nworkload: w\nname: 3\n", "x.yaml:3:7: name: expected str, got 3"),
    ],
)
def test_unreadable_files(write, content: bytes, message: str) -> None:  # type: ignore[no-untyped-def]
    path = write("")
    Path(path).write_bytes(content)
    assert faults(path)[0].startswith(message)


def test_a_long_file_needs_a_name(write) -> None:  # type: ignore[no-untyped-def]
    long = "a" * 121
    assert faults(write(SMALL, f"{long}.yaml")) == [
        f"{long}.yaml:1:1: the file's name has 121 characters (write `name:` with at most 120)"
    ]
    assert len(load_experiment(write(SMALL + "name: short\n", f"{long}.yaml"))) == 1


def test_a_missing_file_suggests_its_neighbour(write) -> None:  # type: ignore[no-untyped-def]
    write(SMALL, "quick.yaml")
    assert faults("quik.yaml") == ["quik.yaml: no such file (did you mean 'quick.yaml'? known: quick.yaml)"]


def test_a_directory_is_no_experiment(tmp_path: Path) -> None:
    assert faults(str(tmp_path))[0].startswith(f"{tmp_path}: cannot be read")


def test_extends_merges_mappings_and_replaces_lists(write) -> None:  # type: ignore[no-untyped-def]
    write(
        "model: m\nworkload: {use: w, n: 1, m: 2}\nparts: {attention: a, kv: {use: paged, block_size: 8}}\n"
        "quality: [p, q]\nmeasure: {repeats: 4, warmup: 2}\n",
        "base/root.yaml",
    )
    write("extends: base/root.yaml\nparts: {kv: {block_size: 16}}\nmeasure: {repeats: 5}\n", "middle.yaml")
    cells = load_experiment(write("extends: middle.yaml\nworkload: {n: 7}\nquality: [r]\n"))
    experiment = cells[0].experiment
    assert experiment.workload.options == {"n": 7, "m": 2}
    assert experiment.parts["kv"].options == {"block_size": 16}
    assert experiment.parts["attention"].name == "a"
    assert [use.name for use in experiment.quality] == ["r"]
    assert (experiment.measure.repeats, experiment.measure.warmup) == (5, 2)


def test_another_component_inherits_no_options(write) -> None:  # type: ignore[no-untyped-def]
    write(SMALL + "parts: {kv: {use: paged, block_size: 8}}\n", "root.yaml")
    cells = load_experiment(write("extends: root.yaml\nparts: {kv: dense}\nmodel: other\n"))
    assert (cells[0].experiment.parts["kv"].name, cells[0].experiment.parts["kv"].options) == ("dense", {})


def test_null_takes_back_what_was_inherited(write) -> None:  # type: ignore[no-untyped-def]
    write(SMALL + "sweep: {seed: [1, 2]}\nbaseline: {seed: 1}\nquality: [p]\n", "root.yaml")
    cells = load_experiment(write("extends: root.yaml\nsweep:\nbaseline:\nquality:\n"))
    assert (len(cells), cells[0].experiment.quality) == (1, ())


def test_faults_in_an_extended_file_name_that_file(write) -> None:  # type: ignore[no-untyped-def]
    write(SMALL + "sed: 3\n", "root.yaml")
    assert faults(write("extends: root.yaml\n"))[0].startswith("root.yaml:3:1: sed: unknown key (did you mean 'seed'")


def test_circles_and_missing_parents_are_refused(write) -> None:  # type: ignore[no-untyped-def]
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    assert "files extend each other in a circle: a.yaml -> b.yaml -> a.yaml" in faults("a.yaml")[0]
    assert faults(write("extends: nope.yaml\n")) == ["x.yaml:1:10: extends: 'nope.yaml' does not exist"]
    assert faults(write("extends: [a]\n")) == ["x.yaml:1:10: extends: expected a file name, got ['a']"]


def test_set_overrides(write) -> None:  # type: ignore[no-untyped-def]
    path = write(SMALL + "parts: {kv: {use: paged, block_size: 8}}\nsweep: {seed: [1, 2]}\nbaseline: {seed: 1}\n")
    sets = ["workload.n=4", "parts.attention=sdpa", "parts.kv.block_size=16", "dtype=float32", "quality=[p]",
            "sweep.seed=[3]", "baseline.seed=3", "measure.goodput.ttft_s=1e-1"]  # fmt: skip
    (cell,) = load_experiment(path, sets)
    experiment = cell.experiment
    assert (experiment.workload.options, experiment.parts["attention"].name) == ({"n": 4}, "sdpa")
    assert experiment.parts["kv"].options == {"block_size": 16}
    assert (experiment.seed, cell.baseline, experiment.dtype) == (3, True, "float32")
    assert (experiment.measure.goodput, experiment.quality[0].name) == ({"ttft_s": 0.1}, "p")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "--set: seed: has no `=` (write --set parts.kv=dense)"),
        ("sed=3", "--set: sed: unknown key (did you mean 'seed'?"),
        ("limits.max_model_len=x", "--set: limits.max_model_len: expected int | null, got 'x'"),
        ("dtype=[", "--set: dtype: not valid YAML"),
        ("quality.0=p", "--set: quality.0: single items of a list cannot be set"),
        (
            "parts.kv=dense",
            "--set: parts.kv: parts.kv is swept, so this would have no effect (set sweep.parts.kv=[",
        ),
        ("parts.kv.n=1", "--set: parts.kv.n: parts.kv is swept"),
        ("seed=7", "--set: seed: seed is swept, so this would have no effect (set sweep.zip.seed=[...]"),
        ("extends=a", "--set: extends: cannot be set"),
        ("=3", "--set: cannot be set"),
        ("model=", "--set: model: expected a mapping, got nothing"),
        ("sweep.parts.kvv=[a]", "--set: sweep.parts.kvv: no such path in an experiment (did you mean 'parts.kv'?"),
    ],
)
def test_faults_of_set(write, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    found = faults(write(SMALL + "sweep: {parts.kv: [a, b], zip: {seed: [1, 2]}}\n"), text)
    assert found[0].startswith(message), found


def test_all_faulty_sets_are_reported(write) -> None:  # type: ignore[no-untyped-def]
    assert len(faults(write(SMALL), "a", "quality.0=1", "seed=[")) == 3
