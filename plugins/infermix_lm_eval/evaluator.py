"""Runs lm-eval tasks on an engine and turns their results into quality metrics."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
from datasets.exceptions import DatasetsError
from infermix.errors import UserError, nearest
from infermix.quality.corpus import require_tokenizer
from infermix.roles.engine import Engine
from infermix.roles.evaluator import EvaluatorContext, Quality
from lm_eval.tasks import TaskManager

from infermix_lm_eval.adapter import EngineLM
from infermix_lm_eval.local_tasks import all_local, find_tasks, write_overlays
from infermix_lm_eval.plugin import LmEvalOptions

#: Resamples behind the standard error of metrics that are not means.
BOOTSTRAP_ITERATIONS = 1000


class LmEvalEvaluator:
    """One `Quality` per task, metric and filter; samples are the per-item values, in the order of the items."""

    def __init__(self, options: LmEvalOptions, context: EvaluatorContext) -> None:
        self._options, self._context = options, context

    def evaluate(self, engine: Engine) -> list[Quality]:
        """Raises `UserError` for unknown tasks, data that cannot be loaded, and settings without a counterpart."""
        options, seed = self._options, self._context.seed
        model = EngineLM(
            engine,
            require_tokenizer(engine, "lm_eval"),
            max_length=options.max_length,
            batch_size=options.batch_size,
            add_bos=options.bos == "bos",
            seed=seed,
            progress=self._context.progress,
        )
        with tempfile.TemporaryDirectory(prefix="infermix-tasks-") as overlays:
            manager = self._task_manager(Path(overlays))
            self._refuse_unknown(manager)
            tasks = self._load(manager)
        results: Any = lm_eval.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        shared = {"lm_eval": lm_eval.__version__, "num_truncated": model.num_truncated}
        return [
            metric for task in sorted(results["results"]) for metric in task_metrics(task, results, options, shared)
        ]

    def _task_manager(self, overlays: Path) -> TaskManager:
        if self._options.include_path is None:
            return TaskManager()
        folder = self._context.base / self._options.include_path
        local = list(find_tasks(folder))
        write_overlays(local, overlays)
        # The index of lm-eval's own tasks takes seconds to build: only when a name is not among the local ones.
        complete = all_local(self._options.tasks, local)
        return TaskManager(include_path=[str(folder), str(overlays)], include_defaults=not complete)

    def _refuse_unknown(self, manager: TaskManager) -> None:
        for name in self._options.tasks:
            if name not in manager.all_tasks:
                close = nearest(name, manager.all_tasks) or ""
                raise UserError(
                    f"lm-eval has no task called {name!r}",
                    key="quality.lm_eval.tasks",
                    hint=close.partition("? ")[0] + "?" if close.startswith("did") else "see `lm-eval ls tasks`",
                )

    def _load(self, manager: TaskManager) -> list[Any]:
        try:
            loaded = manager.load(list(self._options.tasks))
        except (OSError, ValueError, KeyError, ImportError, DatasetsError) as error:
            raise UserError(
                f"the tasks {', '.join(self._options.tasks)} cannot be loaded: {error}",
                key="quality.lm_eval.tasks",
                hint="data from the Hugging Face hub need a network or a filled cache",
            ) from error
        groups = [group for name, group in loaded["groups"].items() if name in self._options.tasks]
        inside = {task.task_name for group in groups for task in group.get_all_tasks()}
        return [*groups, *(task for name, task in loaded["tasks"].items() if name not in inside)]


def task_metrics(task: str, results: Any, options: LmEvalOptions, shared: dict[str, Any]) -> Iterator[Quality]:
    """The metrics of one task. Names look like `hellaswag.acc_norm[fewshot=0,limit=200,bos=none,version=1.0]`.

    `details` of the first one hold the log-likelihood of every choice of every item, for paired comparison.
    """
    version, fewshot = results["versions"].get(task), results["n-shot"].get(task, 0)
    limit = options.limit or "none"
    protocol = f"fewshot={fewshot},limit={limit},bos={options.bos},version={version}"
    details = {**shared, "task_version": version, "num_fewshot": fewshot}
    values = results["results"][task]
    items = results.get("samples", {}).get(task, [])
    choices = _log_likelihoods(items)
    for key, value in values.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        own = [item for item in items if item["filter"] == chosen]
        higher = results["higher_is_better"].get(task, {}).get(metric)
        stderr = values.get(f"{metric}_stderr,{chosen}")
        yield Quality(
            name=f"{task}.{metric if chosen == 'none' else key}[{protocol}]",
            value=float(value),
            unit=metric if higher is False else "ratio",
            better="lower" if higher is False else "higher",
            stderr=float(stderr) if isinstance(stderr, int | float) else None,
            samples=_per_item(metric, own),
            details={**details, "filter": chosen, "num_items": len(own)}
            | ({"log_likelihoods": choices} if choices else {}),
        )
        choices = []


def _per_item(metric: str, items: Sequence[dict[str, Any]]) -> list[float]:
    """One number per item; (log-likelihood, weight) pairs, as perplexities have, become nats per unit of weight."""
    values: list[Any] = [item.get(metric) for item in items]
    if all(isinstance(value, int | float) for value in values):
        return [float(value) for value in values]
    if all(isinstance(value, tuple) and len(value) == 2 for value in values):
        return [-float(total) / float(weight) for total, weight in values]
    return []


def _log_likelihoods(items: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Per item, the log-likelihood of each choice; empty for tasks that ask for something else."""
    rows = []
    for item in items:
        answers = [responses[0] for responses in item["resps"]]
        if not all(isinstance(answer, tuple | list) and len(answer) == 2 for answer in answers):
            return []
        rows.append([float(answer[0]) for answer in answers])
    return rows
