"""`infermix doctor`: the machine, the libraries, which parts can run here, and the measured ceilings."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from infermix.commands.plugins import SAMPLE_MODEL
from infermix.cost.machine import machine_facts, store_ceilings
from infermix.errors import UserError
from infermix.paths import cache_dir
from infermix.plugins import Catalogue, load_catalogue
from infermix.roles.component import Registered
from infermix.roles.facts import Ceilings, MachineFacts

if TYPE_CHECKING:
    from rich.console import Console

HELP = "What this machine has, which parts can run on it, and its measured ceilings."

_LIBRARIES = ("torch", "transformers", "triton", "safetensors", "tokenizers", "gguf", "nvidia-ml-py")
_DEVICES = ("cpu", "cuda")
#: Load average above which something else is computing.
_BUSY_LOAD = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="measure copy GB/s and matmul FLOP/s, and store them")
    parser.add_argument("--device", default=None, help="only this device: cpu, cuda or cuda:N (all there are)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads while measuring (all usable ones)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def execute(args: argparse.Namespace) -> int:
    if args.threads is not None and args.threads < 1:
        raise UserError(f"{args.threads} is no number of threads", where="--threads")
    machines = _machines(args.device)
    if args.measure:
        machines = {name: _measured(name, machine, args.threads) for name, machine in machines.items()}
    catalogue = load_catalogue()
    if args.json:
        print(json.dumps(_data(machines, catalogue), indent=2))
    else:
        _show(machines, catalogue)
    return 0


def _machines(device: str | None) -> dict[str, MachineFacts]:
    """Facts per device name. Raises `UserError` for one that was asked for and is not here."""
    if device is not None:
        return {device: machine_facts(device)}
    found = {}
    for name in _DEVICES:
        try:
            found[name] = machine_facts(name)
        except UserError:  # no GPU: said by its absence
            continue
    return found


def _measured(device: str, machine: MachineFacts, num_threads: int | None) -> MachineFacts:
    from infermix.measure.ceilings import measure_ceilings

    threads = num_threads or machine.num_cores
    load = os.getloadavg()[0]
    if load > _BUSY_LOAD:
        print(f"warning: the load is {load:.1f}; ceilings measured now may be too low", file=sys.stderr)
    store_ceilings(machine, measure_ceilings(device, threads))
    return machine_facts(device)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _needed_device(entry: Registered, machines: dict[str, MachineFacts]) -> str | None:
    """Why no device here will do, when the component asks for one that is not here."""
    try:
        options = entry.component.options()
    except TypeError:  # some option has no default, so its needs cannot be asked without an experiment
        return None
    missing: list[str] = []
    for machine in machines.values():
        needs = entry.component.needs(options, SAMPLE_MODEL, machine)
        unmet = [need for need in needs if need.startswith(("device:", "sm:")) and need not in machine.provides]
        if not unmet:
            return None
        missing += unmet
    return f"needs {', '.join(sorted(set(missing)))}"


def _verdicts(catalogue: Catalogue, machines: dict[str, MachineFacts]) -> list[tuple[str, str, str | None]]:
    """(role, name, why it cannot run here or `None`)."""
    return [
        (
            entry.component.role.value,
            entry.component.name,
            entry.unavailable or _needed_device(entry, machines),
        )
        for entry in catalogue.all()
    ]


def _data(machines: dict[str, MachineFacts], catalogue: Catalogue) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libraries": _versions(),
        "devices": {name: _machine(machine) for name, machine in machines.items()},
        "components": [
            {"role": role, "name": name, "ready": reason is None, "reason": reason}
            for role, name, reason in _verdicts(catalogue, machines)
        ],
        "plugin_errors": dict(catalogue.errors),
        "cache": str(cache_dir()),
        "launch_tables": _launch_tables(),
    }


def _launch_tables() -> dict[str, int]:
    """Files of measured launch parameters, one per machine and family of kernels, and how many each holds."""
    tables = {}
    for path in sorted(cache_dir("kernels").glob("*.json")):
        try:
            content = json.loads(path.read_text())
            tables[path.stem] = len(content.get("entries", content))
        except (ValueError, AttributeError):  # half written or of another version: its owner replaces it
            tables[path.stem] = 0
    return tables


def _machine(machine: MachineFacts) -> dict[str, Any]:
    return {
        "name": machine.name,
        "memory_bytes": machine.memory_bytes,
        "num_cores": machine.num_cores,
        "compute_capability": machine.compute_capability,
        "dtypes": sorted(machine.dtypes),
        "fingerprint": machine.fingerprint,
        "copy_bytes_per_s": machine.ceilings.copy_bytes_per_s,
        "matmul_flops_per_s": dict(machine.ceilings.matmul_flops_per_s),
        "measured_at": machine.ceilings.measured_at,
    }


def _show(machines: dict[str, MachineFacts], catalogue: Catalogue) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in _versions().items())
    console.print(f"libraries: {versions}")
    console.print(f"caches: {cache_dir()}")
    tables = ", ".join(f"{name} ({count})" for name, count in _launch_tables().items())
    console.print(f"measured launch parameters: {tables or 'none; engine option `tune: auto` measures them'}\n")
    for name, machine in machines.items():
        _show_machine(console, name, machine)
    if not any(machine.device == "cuda" for machine in machines.values()):
        console.print("cuda: NVML shows no GPU\n")
    _show_components(console, catalogue, machines)


def _show_machine(console: Console, name: str, machine: MachineFacts) -> None:
    capability = f", sm_{machine.compute_capability}" if machine.compute_capability else ""
    console.print(
        f"[bold]{name}[/]: {machine.name}, {machine.memory_bytes / 1e9:.1f} GB, "
        f"{machine.num_cores} usable cores{capability}"
    )
    console.print(f"  dtypes: {', '.join(sorted(machine.dtypes))}")
    console.print(f"  ceilings: {_ceilings(machine.ceilings)}\n")


def _ceilings(ceilings: Ceilings) -> str:
    if ceilings.copy_bytes_per_s is None:
        return "not measured; run `infermix doctor --measure`"
    rates = ", ".join(
        f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in sorted(ceilings.matmul_flops_per_s.items())
    )
    return f"copy {ceilings.copy_bytes_per_s / 1e9:,.1f} GB/s (read + write), matmul {rates} ({ceilings.measured_at})"


def _show_components(console: Console, catalogue: Catalogue, machines: dict[str, MachineFacts]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="parts", title_justify="left")
    for name in ("role", "name", "here"):
        table.add_column(name)
    for role, name, reason in _verdicts(catalogue, machines):
        table.add_row(role, name, f"[yellow]unavailable: {escape(reason)}[/]" if reason else "[green]ready[/]")
    console.print(table)
    for name, error in catalogue.errors.items():
        console.print(f"[red]plugin {escape(name)} failed to load: {escape(error)}[/]")
