"""From cells to plans: names become components, options are validated, and every mix gets its verdict.

What the user wrote wrongly (an unknown name, a bad option, a missing model) is an error of the experiment. A mix that
cannot run is a verdict of its cell, with one sentence per reason. Nothing is run and no torch is imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from infermix.cost.machine import machine_facts
from infermix.cost.memory import MemoryPrediction
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.drafts import Drafts
from infermix.errors import UserError, UserErrors
from infermix.features import match
from infermix.fitting import Fitter, ignored_limits
from infermix.measure.names import measure_faults
from infermix.plugins import Catalogue
from infermix.roles.component import PART_ROLES, Choice, Features, Role
from infermix.roles.decoder import DecoderOptions
from infermix.roles.engine import EngineOptions
from infermix.roles.evaluator import EvaluatorOptions
from infermix.roles.facts import MachineFacts, ModelFacts, ResolvedSource
from infermix.roles.quantizer import QuantizerOptions
from infermix.roles.workload import WorkloadOptions
from infermix.spec.experiment import DEFAULT_PARTS, Cell, Experiment, Measure, ModelSource, Use
from infermix.spec.load import Sweep
from infermix.spec.validate import Locate, Report, check_struct, nowhere
from infermix.spec.yaml_marks import KeyPath

_ReadsFiles = WorkloadOptions | EvaluatorOptions | QuantizerOptions | EngineOptions | DecoderOptions

#: How the place of a line inside a data file ends.
_IN_FILE = re.compile(r":\d+$")


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """One cell with its verdict. `reasons` say why it does not run; `adapters` map feature -> adapter.

    `parts` are those that the engine hosts. `facts.dtype` equals `dtype`, never "auto". `max_model_len` (tokens) and
    `max_num_seqs` are what the memory prediction assumes; KV of `sequences_that_fit` such sequences has room.
    """

    cell: Cell
    runs: bool
    reasons: tuple[str, ...]
    adapters: Mapping[str, str]
    engine: Choice
    workload: Choice
    parts: Mapping[Role, Choice]
    evaluators: tuple[Choice, ...]
    source: ResolvedSource | None
    facts: ModelFacts | None
    machine: MachineFacts
    device: str
    dtype: str
    memory: MemoryPrediction | None
    time_limit_s: float
    max_model_len: int = 0
    max_num_seqs: int = 0
    sequences_that_fit: int | None = None
    transforms: tuple[Choice, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the cell states and its engine has no use for."""
        if self.facts is None:
            return ()
        return tuple(ignored_limits(self.cell.experiment.limits, self.engine, self.facts, self.machine))


@dataclass(frozen=True)
class _Chosen:
    """The components of one cell. `explicit` are the parts that the experiment names, `inner` the decoders that the
    decoder's options name, from the outside in.
    """

    engine: Choice
    workload: Choice
    explicit: Mapping[Role, Choice]
    parts: Mapping[Role, Choice]
    evaluators: tuple[Choice, ...]
    transforms: tuple[Choice, ...]
    inner: tuple[Choice, ...]


def compose(cells: Iterable[Cell], catalogue: Catalogue, *, machine: MachineFacts | None = None) -> list[CellPlan]:
    """A plan per cell, in order. `machine` stands in for the machine at hand.

    Raises `UserErrors` for everything that is wrongly written, with file and line when `cells` is a `Sweep`.
    """
    chooser = _Chooser(catalogue)
    planner = _Planner(machine, catalogue)
    drafts: list[tuple[Cell, _Chosen | None, Locate]] = []
    errors: list[UserError] = []
    for cell in cells:
        report = Report(_locator(cells, cell))
        _check_measure(cell.experiment.measure, report)
        drafts.append((cell, chooser.choose(cell, report), report.locate))
        errors += report.errors
    _raise_all(errors)
    plans = []
    for cell, chosen, locate in drafts:
        assert chosen is not None
        try:
            plans.append(planner.plan(cell, chosen))
        except UserError as error:
            errors.append(_placed(error, locate))
    _raise_all(errors)
    return plans


def _locator(cells: Iterable[Cell], cell: Cell) -> Locate:
    return functools.partial(cells.locate, cell) if isinstance(cells, Sweep) else nowhere


def _check_measure(measure: Measure, report: Report) -> None:
    for fault in measure_faults(measure):
        report.add(("measure", *fault.path), fault.message, fault.hint, key=fault.of_name)


def _raise_all(errors: Sequence[UserError]) -> None:
    unique = {str(error): error for error in errors}
    if unique:
        raise UserErrors(unique.values())


def _placed(error: UserError, locate: Locate) -> UserError:
    """A fault of a model source, with the line that names the model."""
    if error.where is not None or isinstance(error, UserErrors):
        return error
    key = error.key or "model.source"
    return UserError(error.message, where=locate(tuple(key.split("."))), key=key, hint=error.hint)


class _Chooser:
    """Looks components up and validates their options, each distinct choice once."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._known: dict[tuple[Role, bytes], Choice] = {}
        self._checked: dict[tuple[int, str], UserError | None] = {}

    def choose(self, cell: Cell, report: Report) -> _Chosen | None:
        experiment = cell.experiment
        engine = self._choice(Role.ENGINE, experiment.engine, ("engine",), report)
        workload = self._choice(Role.WORKLOAD, experiment.workload, ("workload",), report)
        explicit = {
            Role(role): self._choice(Role(role), use, ("parts", role), report)
            for role, use in experiment.parts.items()
        }
        evaluators = self._list(Role.EVALUATOR, "quality", experiment.quality, report)
        transforms = self._list(Role.TRANSFORM, "transforms", experiment.transforms, report)
        if engine is None or workload is None or None in explicit.values():
            return None
        if evaluators is None or transforms is None:
            return None
        self._check_files(engine, ("engine",), experiment.base, report)
        self._check_files(workload, ("workload",), experiment.base, report)
        for index, evaluator in enumerate(evaluators):
            self._check_files(evaluator, ("quality", index), experiment.base, report)
        given = {role: choice for role, choice in explicit.items() if choice is not None}
        for role, choice in given.items():
            self._check_files(choice, ("parts", role.value), experiment.base, report)
        parts = self._hosted(engine, given, report)
        inner = self._inner(parts.get(Role.DECODER), experiment.base, report) if parts is not None else None
        if parts is None or inner is None:
            return None
        return _Chosen(engine, workload, given, parts, evaluators, transforms, inner)

    def _list(self, role: Role, key: str, uses: Sequence[Use], report: Report) -> tuple[Choice, ...] | None:
        choices = [self._choice(role, use, (key, index), report) for index, use in enumerate(uses)]
        found = tuple(choice for choice in choices if choice is not None)
        return found if len(found) == len(uses) else None

    def _hosted(self, engine: Choice, given: Mapping[Role, Choice], report: Report) -> dict[Role, Choice] | None:
        """One part for every role that the engine takes, the default where the experiment names none."""
        parts: dict[Role, Choice] = {}
        for role in PART_ROLES:
            if role in engine.component.hosts:
                default = Use(DEFAULT_PARTS[role.value])
                choice = given.get(role) or self._choice(role, default, ("parts", role.value), report)
                if choice is None:
                    return None
                parts[role] = choice
        return parts

    def _inner(self, decoder: Choice | None, base: str, report: Report) -> tuple[Choice, ...] | None:
        """Decoders that the options of others name."""
        found: list[Choice] = []
        at: KeyPath = ("parts", Role.DECODER.value)
        while decoder and isinstance(decoder.options, DecoderOptions) and (named := decoder.options.inner_decoder()):
            name_at, at = (*at, "decoder"), (*at, "decoder_options")
            decoder = self._choice(Role.DECODER, Use(named.name, dict(named.options)), at, report, name_at)
            if decoder is None:
                return None
            self._check_files(decoder, at, base, report)
            found.append(decoder)
        return tuple(found)

    def _choice(
        self, role: Role, use: Use, path: KeyPath, report: Report, name_at: KeyPath | None = None
    ) -> Choice | None:
        key = (role, msgspec.json.encode(use))
        if key not in self._known:
            choice = self._validated(role, use, path, report, name_at or (*path, "use"))
            if choice is None:
                return None
            self._known[key] = choice
        return self._known[key]

    def _validated(self, role: Role, use: Use, path: KeyPath, report: Report, name_at: KeyPath) -> Choice | None:
        try:
            registered = self._catalogue.find(role, use.name)
        except UserError as error:
            report.add(name_at, error.message, self._with_failures(error.hint))
            return None
        options = check_struct(use.options, registered.component.options, path, report)
        return Choice(registered, options) if options is not None else None

    def _check_files(self, choice: Choice, at: KeyPath, base: str, report: Report) -> None:
        """Files that options name are read once per distinct choice, before anything starts."""
        if not isinstance(choice.options, _ReadsFiles):
            return
        key = (id(choice), base)
        if key not in self._checked:
            self._checked[key] = _fault_of(choice.options, Path(base))
        error = self._checked[key]
        if error is None:
            return
        if error.where and _IN_FILE.search(error.where):
            report.errors.append(error)
        else:
            path = (*at, error.key.rpartition(".")[2]) if error.key else at
            report.add(path, ": ".join(filter(None, (error.where, error.message))), error.hint)

    def _with_failures(self, hint: str | None) -> str | None:
        broken = ", ".join(sorted(self._catalogue.errors))
        return f"{hint or ''}; plugins that failed to load: {broken}".strip("; ") if broken else hint


def _fault_of(options: _ReadsFiles, base: Path) -> UserError | None:
    try:
        options.check(base)
    except UserError as error:
        return error
    return None


class _Planner:
    """Judges cells; model, machine and sizes are read once per distinct source, device and layout."""

    def __init__(self, machine: MachineFacts | None, catalogue: Catalogue) -> None:
        self._given = machine
        self._machines: dict[str, tuple[MachineFacts, str | None]] = {}
        self._models: dict[bytes, tuple[ResolvedSource, ModelFacts]] = {}
        self._dtyped: dict[tuple[int, str], ModelFacts] = {}
        self._fitter = Fitter()
        self._drafts = Drafts(catalogue, lambda source, base: self._model(source, base)[1], self._with_dtype)

    def plan(self, cell: Cell, chosen: _Chosen) -> CellPlan:
        """Raises `UserError` when the model cannot be found or read."""
        experiment = cell.experiment
        machine, no_device = self._machine(experiment.device)
        source, native = self._model(experiment.model, Path(experiment.base))
        dtype = resolve_dtype(experiment.dtype, native.dtype, source, machine.device)
        facts = self._with_dtype(native, dtype)
        problems = [*_unavailable(chosen), *_not_hosted(chosen), *_refused(chosen, facts), *_too_many_outputs(chosen)]
        decoders = [choice for choice in (chosen.parts.get(Role.DECODER), *chosen.inner) if choice is not None]
        second, unfit = self._drafts.beside(decoders, Path(experiment.base), facts)
        choices = {Role.ENGINE: chosen.engine, **chosen.parts, Role.WORKLOAD: chosen.workload}
        limits = _stated_limits(experiment)
        matched = match(choices, chosen.evaluators, facts, machine, chosen.transforms, limits, chosen.inner)
        parts = {role: matched.choices[role] for role in chosen.parts}
        sizes = self._fitter.fit(
            experiment.limits, choices, chosen.evaluators, facts, machine, second,
            inner=chosen.inner, base=Path(experiment.base),
        )  # fmt: skip
        problems += [no_device] if no_device else [*matched.problems, *unfit, *sizes.problems]
        reasons = tuple(dict.fromkeys(problems))
        return CellPlan(
            cell=cell, runs=not reasons, reasons=reasons, adapters=matched.adapters,
            engine=matched.choices[Role.ENGINE], workload=chosen.workload, parts=parts,
            evaluators=chosen.evaluators, source=source, facts=facts, machine=machine, device=machine.device,
            dtype=dtype, memory=sizes.memory, time_limit_s=experiment.measure.time_limit_s,
            max_model_len=sizes.max_model_len, max_num_seqs=sizes.max_num_seqs,
            sequences_that_fit=sizes.sequences_that_fit, transforms=matched.transforms,
        )  # fmt: skip

    def _machine(self, device: str) -> tuple[MachineFacts, str | None]:
        """The machine, and why the cell cannot run when it lacks the device (then the CPU stands in)."""
        if self._given is not None:
            wrong = device not in ("auto", self._given.device)
            return self._given, f"this machine has no device {device}" if wrong else None
        if device not in self._machines:
            try:
                self._machines[device] = (machine_facts(device), None)
            except UserError as error:
                self._machines[device] = (machine_facts("cpu"), error.message)
        return self._machines[device]

    def _model(self, model: ModelSource, base: Path) -> tuple[ResolvedSource, ModelFacts]:
        key = msgspec.json.encode(model)
        if key not in self._models:
            source = resolve_source(model, base)
            facts = read_model_facts(source, dtype="auto", dummy=model.weights == "dummy")
            self._models[key] = (source, facts)
        return self._models[key]

    def _with_dtype(self, facts: ModelFacts, dtype: str) -> ModelFacts:
        """The same facts in another dtype, one object each, so that what they cache is computed once."""
        if facts.dtype == dtype:
            return facts
        return self._dtyped.setdefault((id(facts), dtype), replace(facts, dtype=dtype))


def resolve_dtype(asked: str, native: str, source: ResolvedSource, device: str) -> str:
    """The dtype of a cell. "auto" is the checkpoint's own, but bfloat16 for float32 weights on a GPU."""
    if asked != "auto":
        return asked
    if source.kind == "gguf" and device == "cpu":
        return "float32"
    return "bfloat16" if native == "float32" and device != "cpu" else native


def _stated_limits(experiment: Experiment) -> Features:
    """What parts may need, or not keep, of the experiment's limits: `limits:KEY` for every optional one that is set,
    `goodput:KEY` for those on single requests."""
    stated = {
        f"limits:{name}" for name, value in msgspec.structs.asdict(experiment.limits).items() if value is not None
    }
    return frozenset(stated | {f"goodput:{name}" for name in experiment.measure.goodput})


def _unavailable(chosen: _Chosen) -> list[str]:
    parts = (*chosen.parts.values(), *chosen.inner, *chosen.transforms)
    everyone = (chosen.engine, *parts, chosen.workload, *chosen.evaluators)
    return [
        f"{choice.component.role.value} {choice.component.name!r} {choice.registered.unavailable}"
        for choice in everyone
        if choice.registered.unavailable
    ]


def _not_hosted(chosen: _Chosen) -> list[str]:
    component = chosen.engine.component
    hosted = ", ".join(role.value for role in PART_ROLES if role in component.hosts) or "no part"
    refused = [
        f"engine {component.name!r} takes {hosted}, not {role.value} {choice.component.name!r}"
        for role, choice in chosen.explicit.items()
        if role not in component.hosts
    ]
    if chosen.transforms and Role.TRANSFORM not in component.hosts:
        names = ", ".join(repr(choice.component.name) for choice in chosen.transforms)
        refused.append(f"engine {component.name!r} applies no model transforms, so not {names}")
    return refused


def _refused(chosen: _Chosen, facts: ModelFacts) -> list[str]:
    """A model that the joint must not drive is refused for every engine that takes an attention part."""
    hosts_joint = Role.ATTENTION in chosen.engine.component.hosts
    return [facts.refusal] if facts.refusal and hosts_joint else []


def _too_many_outputs(chosen: _Chosen) -> list[str]:
    decoder, wanted = chosen.parts.get(Role.DECODER), getattr(chosen.workload.options, "num_outputs", 1)
    most = decoder.options.most_outputs() if decoder and isinstance(decoder.options, DecoderOptions) else None
    if decoder is None or most is None or wanted <= most:
        return []
    return [
        f"workload {chosen.workload.component.name!r} wants {wanted} outputs of each prompt, but decoder "
        f"{decoder.component.name!r} finds {most} at most"
    ]
