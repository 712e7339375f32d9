"""The command line: verbs, exit codes, errors without tracebacks, light imports."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from fake_parts import write_config
from infermix import cli
from infermix.errors import OutOfMemory, UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role

ROOT = Path(__file__).resolve().parents[2]
VERBS = [
    "run",
    "plan",
    "find-rate",
    "calibrate",
    "predict",
    "plugins",
    "schema",
    "leaderboard",
    "compare",
    "show",
    "cost",
    "kv",
    "train-heads",
    "doctor",
    "env",
    "new-plugin",
]
EXPERIMENT = """model: {source: tiny.json, weights: dummy}
workload: {use: synthetic, input_tokens: 8, output_tokens: 4}
sweep: {parts.attention: [eager, sdpa], parts.kv: [dense, paged]}
baseline: {parts.attention: eager, parts.kv: dense}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    Path("x.yaml").write_text(EXPERIMENT)
    return tmp_path


def test_verbs_are_frozen() -> None:
    assert list(cli.VERBS) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "--help"])
    assert stopped.value.code == 0
    assert f"usage: infermix {verb}" in capsys.readouterr().out


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert capsys.readouterr().out == out
    assert all(f"  {verb} " in out for verb in VERBS)


def test_an_unknown_verb_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pluggins"]) == 2
    assert "error: there is no command 'pluggins' (did you mean 'plugins'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (UserError("is wrong", where="x.yaml:3:1", key="a.b"), 2, "error: x.yaml:3:1: a.b: is wrong\n"),
        (OutOfMemory("no room"), 1, "error: no room\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(args: object) -> int:
        raise raised

    verb = types.SimpleNamespace(HELP="", add_arguments=lambda parser: None, execute=execute)
    monkeypatch.setitem(sys.modules, "infermix.commands.show", verb)
    assert cli.main(["show"]) == code
    assert capsys.readouterr().err == text


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    verb = types.SimpleNamespace(HELP="", add_arguments=lambda parser: None, execute=lambda args: 1 // 0)
    monkeypatch.setitem(sys.modules, "infermix.commands.show", verb)
    with pytest.raises(ZeroDivisionError):
        cli.main(["show"])


def test_plan_prints_verdicts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "x.yaml", "--set", "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "attention=eager,kv=dense *" in out
    assert "runs via gather" in out
    assert "4 of 4 cells run on cpu" in out


def test_plan_as_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "x.yaml", "--json", "--only", "*kv=paged", "--set", "device=cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["cell"] for row in rows] == ["attention=eager,kv=paged", "attention=sdpa,kv=paged"]
    assert rows[0]["adapters"] == {"view:dense": "gather"}
    assert rows[0]["memory"]["total_bytes"] > rows[0]["memory"]["kv_bytes"] > 0


def test_plan_says_why_nothing_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "x.yaml", "--set", "workload.input_tokens=600", "--set", "device=cpu"]) == 1
    out = capsys.readouterr().out
    assert "attention=sdpa,kv=paged: workload 'synthetic' asks for sequences of 604 tokens, but the model" in out
    assert "0 of 4 cells run" in out


def test_plan_of_bad_input_is_one_clear_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(EXPERIMENT.replace("paged", "pagd"))
    assert cli.main(["plan", "x.yaml"]) == 2
    captured = capsys.readouterr()
    known = sorted(registered.component.name for registered in load_catalogue().all(Role.KV))
    assert captured.out == ""
    assert captured.err == (
        "error: x.yaml:3:59: parts.kv.use: no kv component is called 'pagd' "
        f"(did you mean 'paged'? known: {', '.join(known)})\n"
    )


def test_plugins_lists_options_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "kv"]) == 0
    out = capsys.readouterr().out
    assert "block_size (int, tokens, 1 <= x <= 4096, default 16): tokens in one block" in out
    assert "ready; from infermix " in out
    assert "adapters: view:dense via gather" in out
    assert "sdpa" not in out


def test_plugins_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    by_name = {(each["role"], each["name"]): each for each in data["components"]}
    assert by_name["engine", "native"]["hosts"] == [
        "attention", "decoder", "kv", "quantizer", "scheduler", "transform",
    ]  # fmt: skip
    assert by_name["attention", "sdpa"]["needs"] == ["view:dense|view:ragged"]
    assert set(data) == {"components", "errors"}


def test_plugins_of_an_unknown_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "atention"]) == 2
    assert "did you mean 'attention'?" in capsys.readouterr().err


def test_schema_goes_to_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", "-o", "s.json"]) == 0
    assert json.loads(Path("s.json").read_text())["title"] == "InferMix experiment"
    assert cli.main(["schema", "-o", "no/such/folder/s.json"]) == 2


def test_plan_imports_nothing_heavy(here: Path) -> None:
    command = (
        "import sys; from infermix.cli import main; code = main(['plan', 'x.yaml', '--set', 'device=cpu'])\n"
        "print('HEAVY', sorted({'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0", done.stderr


def test_a_reader_that_leaves_is_no_fault() -> None:
    command = f"{sys.executable} -m infermix.cli plugins --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
