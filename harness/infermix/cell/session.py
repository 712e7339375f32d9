"""One cell inside its child process: set up, warm up, repeat, evaluate, close."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from infermix.cell.outputs import drop_ids, figures, first_outputs
from infermix.cell.parts import engine_record, part_records, transform_records
from infermix.cell.phases import Phases, ReportProgress
from infermix.cell.reference import reference_plan
from infermix.cell.sizes import check_requests, longest_allowed, max_model_len, max_num_seqs
from infermix.compose import compose
from infermix.errors import UserError
from infermix.extra_plugins import load_extra_plugins
from infermix.measure.clock import now_ns
from infermix.measure.drive import drive
from infermix.measure.goodput import output_tokens
from infermix.measure.memory import MemoryMeter
from infermix.measure.repeat import measure_repeat, simulate_repeat
from infermix.measure.stats import is_steady
from infermix.measure.thin import thin
from infermix.plugins import distributions, load_catalogue
from infermix.protocol import CeilingsDone, Done, OutputFigures, QualityDone, RepeatDone, RunRepeat, Setup, SetupDone
from infermix.record.environment import capture_environment
from infermix.record.record import QualityRecord, Repeat
from infermix.roles.component import Role
from infermix.roles.engine import EngineContext
from infermix.roles.evaluator import EvaluatorContext
from infermix.roles.workload import WorkloadContext

if TYPE_CHECKING:
    from infermix.compose import CellPlan
    from infermix.roles.component import Choice
    from infermix.roles.engine import Engine, EngineReport, Tokenizer
    from infermix.roles.evaluator import Quality
    from infermix.roles.request import Request
    from infermix.roles.workload import Workload


class CellSession:
    """Everything of one cell that lives as long as its process. Methods raise; the child turns that into a state."""

    def __init__(self, setup: Setup, progress: ReportProgress) -> None:
        self._cell, self._num_repeats = setup.cell, setup.repeats
        self._phases = Phases(progress)
        with self._phases("plan"):
            self._catalogue = load_catalogue(load_extra_plugins(setup.extra_plugins))
            (self._plan,) = compose([self._cell], self._catalogue)
        self._refuse_what_does_not_run()
        self._meter = MemoryMeter(self._plan.device)
        self._limits = {"max_model_len": self._plan.max_model_len, "max_num_seqs": self._plan.max_num_seqs}
        self._engine: Engine | None = None
        self._workload: Workload | None = None

    def prepare(self) -> Done:
        """The job of a quantizer that works in an environment of its own; what it makes is kept in the cache."""
        choice = self._plan.parts.get(Role.QUANTIZER)
        if choice is None or choice.component.environment is None:
            return Done()
        from infermix.engine.isolated import prepare

        quantizer = choice.component.build(choice.options, None)
        made = prepare(quantizer, choice.options, self._engine_context(self._plan))
        kept = "found in the cache" if made.facts["from_cache"] else f"made in {made.facts['quantize_s']:.0f} s"
        return Done(notes=[f"quantized checkpoint {made.facts['checkpoint']}: {kept}"])

    def setup(self) -> SetupDone:
        """Tokenizer, workload, engine, warm-up. Measured repeats may follow."""
        tokenizer = self._load_tokenizer()
        with self._phases("workload"):
            self._workload = self._build_workload(tokenizer)
            self._size()
        with self._phases("engine"), self._meter.phase("setup"):
            self._engine = self._build_engine(self._plan)
        with self._phases("warmup"), self._meter.phase("warmup"):
            rates = self._warm_up()
        return self._describe(rates)

    def repeat(self, command: RunRepeat) -> RepeatDone:
        """Measure one repeat; nothing but the engine and the load generator runs meanwhile."""
        requests = self._requests(command.index)
        started = now_ns()
        with self._meter.phase("measure"):
            repeat = self._measure(requests, command.companions)
        elapsed_s = (now_ns() - started) / 1e9
        if self._is_virtual:
            thin(repeat, self._cell.experiment.measure.goodput)
        done = RepeatDone(
            repeat=repeat,
            figures=OutputFigures() if self._is_virtual else figures(repeat, requests),
            elapsed_s=elapsed_s,
            first=[] if self._is_virtual else first_outputs(repeat, requests, self._ready.tokenizer),
            memory=self._meter.figures(),
            executed=dict(self._ready.report().executed),
        )
        drop_ids(repeat)
        return done

    def evaluate(self) -> QualityDone:
        """Quality of the very weights and parts that were timed."""
        if not self._plan.evaluators:
            return QualityDone()
        assert self._plan.facts is not None
        if self._plan.facts.dummy_weights:
            return QualityDone(notes=["quality is n/a: the weights are random (weights: dummy)"])
        self._ready.reset()
        found: dict[str, QualityRecord] = {}
        with self._phases("quality"), self._meter.phase("quality"):
            for choice in self._plan.evaluators:
                for quality in self._evaluate_one(choice):
                    found[quality.name] = _quality_record(quality)
        seconds = {"quality": self._phases.seconds["quality"]}
        return QualityDone(quality=found, memory=self._meter.figures(), phases_s=seconds)

    def profile(self, path: str) -> Done:
        """One repeat more, traced by torch's profiler; its timings are not measurements."""
        from torch.profiler import profile

        requests = self._requests(self._num_repeats + self._cell.experiment.measure.max_warmup)
        with self._phases("profile"), profile() as trace:
            self._drive(requests)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(path)
        return Done(notes=[f"trace of one unmeasured repeat: {Path(path).name}"])

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def _ready(self) -> Engine:
        assert self._engine is not None, "setup comes first"
        return self._engine

    @property
    def _is_virtual(self) -> bool:
        """Whether no token is computed and no time is measured."""
        return hasattr(self._ready, "clock")

    @property
    def _base(self) -> Path:
        return Path(self._cell.experiment.base)

    def _refuse_what_does_not_run(self) -> None:
        if not self._plan.runs:
            raise UserError("the cell does not compose: " + "; ".join(self._plan.reasons))
        assert self._plan.facts is not None
        assert self._plan.source is not None

    def _load_tokenizer(self) -> Tokenizer | None:
        assert self._plan.source is not None
        if self._plan.source.kind == "dummy":
            return None
        from infermix.engine.loader import load_tokenizer

        with self._phases("tokenizer"):
            return load_tokenizer(self._plan.source)

    def _build_workload(self, tokenizer: Tokenizer | None) -> Workload:
        assert self._plan.facts is not None
        context = WorkloadContext(
            tokenizer=tokenizer,
            vocab_size=self._plan.facts.vocab_size,
            max_model_len=longest_allowed(self._plan),
            seed=self._cell.experiment.seed,
            base=self._base,
        )
        workload: Workload = self._plan.workload.component.build(self._plan.workload.options, context)
        return workload

    def _size(self) -> None:
        """Bounds from every request of every repeat, so that no repeat makes the engine grow."""
        assert self._workload is not None
        requests = [request for index in range(self._num_repeats) for request in self._workload.requests(index)]
        if not requests:
            raise UserError("the workload has no requests", key="workload")
        check_requests(requests, longest_allowed(self._plan))
        per_repeat = max(1, len(requests) // self._num_repeats)
        outputs = max(request.sampling.num_outputs for request in requests)
        self._limits = {
            "max_model_len": max_model_len(self._plan, requests, self._plan.evaluators),
            "max_num_seqs": max_num_seqs(
                {**self._plan.parts, Role.ENGINE: self._plan.engine}, self._workload.concurrency, per_repeat, outputs
            ),
        }

    def _build_engine(self, plan: CellPlan) -> Engine:
        engine: Engine = plan.engine.component.build(plan.engine.options, self._engine_context(plan))
        return engine

    def _engine_context(self, plan: CellPlan) -> EngineContext:
        limits = self._cell.experiment.limits
        fraction = {} if limits.kv_memory_fraction is None else {"kv_memory_fraction": limits.kv_memory_fraction}
        assert plan.source is not None
        assert plan.facts is not None
        return EngineContext(
            source=plan.source,
            facts=plan.facts,
            machine=plan.machine,
            dtype=plan.dtype,
            parts=plan.parts,
            max_model_len=self._limits["max_model_len"],
            max_num_seqs=self._limits["max_num_seqs"],
            seed=self._cell.experiment.seed,
            clock_ns=now_ns,
            progress=self._phases.report,
            kv_memory_bytes=limits.kv_memory_bytes,
            kv_swap_bytes=limits.kv_swap_bytes,
            base=self._base,
            transforms=plan.transforms,
            find=self._catalogue.find,
            **fraction,
        )

    def _warm_up(self) -> list[float]:
        """Output tokens/s of unmeasured repeats, until steady or `max_warmup`."""
        measure = self._cell.experiment.measure
        most = max(measure.warmup, measure.max_warmup) if measure.warmup and not self._is_virtual else 0
        rates: list[float] = []
        while len(rates) < most and not (len(rates) >= measure.warmup and is_steady(rates)):
            self._phases.report("warmup", len(rates) / most)
            rates.append(_output_rate(self._drive(self._requests(self._num_repeats + len(rates)))))
        return rates

    def _requests(self, index: int) -> Sequence[Request]:
        assert self._workload is not None
        requests = self._workload.requests(index)
        check_requests(requests, self._limits["max_model_len"])
        return requests

    def _drive(self, requests: Sequence[Request]) -> Repeat:
        """An unmeasured repeat."""
        assert self._workload is not None
        self._ready.reset()
        return drive(self._ready, requests, self._workload.concurrency)

    def _measure(self, requests: Sequence[Request], companions: Sequence[int]) -> Repeat:
        assert self._workload is not None
        self._ready.reset()
        if self._is_virtual:
            return simulate_repeat(self._ready, requests, self._workload.concurrency)
        own = psutil.Process()
        return measure_repeat(
            self._ready,
            requests,
            self._workload.concurrency,
            device=self._plan.device,
            input_tokens=getattr(self._workload, "input_tokens", None),
            keep_outputs=len(requests),
            own_pids={own.pid, *(child.pid for child in own.children(recursive=True)), *companions},
        )

    def _describe(self, rates: list[float]) -> SetupDone:
        report, plan = self._ready.report(), self._plan
        assert plan.facts is not None
        assert plan.source is not None
        assert self._workload is not None
        choices = [plan.engine, plan.workload, *plan.parts.values(), *plan.transforms, *plan.evaluators]
        return SetupDone(
            model={"label": plan.source.label, **msgspec.to_builtins(_model_summary(plan.facts))},
            device=plan.device,
            dtype=plan.dtype,
            engine=engine_record(plan, report),
            parts=part_records(plan, report),
            transforms=transform_records(plan, report),
            limits=self._limits,
            warmup_repeats=len(rates),
            warmup_steady=is_steady(rates) if len(rates) > 1 else None,
            concurrency=self._workload.concurrency,
            phases_s={**self._phases.seconds, **_engine_phases(report)},
            memory={**self._meter.figures(), **_engine_memory(report)},
            self_check=report.self_check,
            environment={
                **capture_environment(
                    plan.machine, plan.device, {name for choice in choices for name in distributions(choice)}
                ),
                "graphs": report.graphs,
                "memory_method": self._meter.method,
                **({"workload": dict(counts)} if (counts := getattr(self._workload, "counts", {})) else {}),
            },
        )

    def _evaluate_one(self, choice: Choice) -> list[Quality]:
        context = EvaluatorContext(
            base=self._base,
            seed=self._cell.experiment.seed,
            reference=self._reference,
            progress=self._phases.report,
        )
        found: list[Quality] = choice.component.build(choice.options, context).evaluate(self._ready)
        return found

    def _reference(self) -> Engine:
        return self._build_engine(reference_plan(self._cell, self._catalogue))


def measure_machine(device: str, progress: ReportProgress) -> CeilingsDone:
    """Copy bandwidth and matmul rate of `device`; needs torch."""
    from infermix.measure.ceilings import measure_ceilings

    progress("ceilings", 0.0)
    ceilings = measure_ceilings(device)
    return CeilingsDone(
        copy_bytes_per_s=ceilings.copy_bytes_per_s,
        matmul_flops_per_s=dict(ceilings.matmul_flops_per_s),
        measured_at=ceilings.measured_at,
    )


def _model_summary(facts: Any) -> dict[str, Any]:
    return {
        "digest": facts.digest,
        "model_type": facts.model_type,
        "architecture": facts.architecture,
        "num_parameters": facts.num_parameters,
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "weight_bytes": facts.weight_bytes,
        "dummy_weights": facts.dummy_weights,
        "notes": list(facts.notes),
    }


def _engine_phases(report: EngineReport) -> dict[str, float]:
    return {f"engine.{name}": seconds for name, seconds in report.setup_s.items()}


def _engine_memory(report: EngineReport) -> dict[str, float]:
    figures = {
        "weight_bytes": report.weight_bytes,
        "kv_bytes": report.kv_bytes,
        "kv_bytes_per_token": report.kv_bytes_per_token,
        "kv_allocated_bytes_per_token": report.kv_allocated_bytes_per_token,
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def _quality_record(quality: Quality) -> QualityRecord:
    return QualityRecord(
        value=quality.value,
        unit=quality.unit,
        better=quality.better,  # type: ignore[arg-type]
        stderr=quality.stderr,
        samples=quality.samples,
        details=quality.details,
    )


def _output_rate(repeat: Repeat) -> float:
    tokens = sum(map(output_tokens, repeat.requests))
    return tokens / repeat.wall_s if repeat.wall_s > 0 else 0.0
