"""Scheduling policies. All but `dynamic` share one core and differ in the order of what waits and in their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Options, Role
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

Tokens = Annotated[int, Meta(ge=1, extra={"unit": "tokens"})]
Weight = Annotated[float, Meta(gt=0)]
Seconds = {"unit": "s"}


class DynamicOptions(Options, frozen=True):
    batch_size: Annotated[int, Meta(ge=1, description="requests of a full batch", extra={"unit": "requests"})] = 8
    max_wait_s: Annotated[
        float, Meta(ge=0, le=5, description="longest wait of a batch's first request for the rest", extra=Seconds)
    ] = 0.05


class IterationOptions(Options, frozen=True):
    max_num_seqs: Annotated[
        int, Meta(ge=1, description="most requests running at once", extra={"unit": "requests"})
    ] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="most tokens computed in one step", extra={"unit": "tokens"})
    ] = 2048
    preemption: Annotated[
        Literal["recompute", "swap"],
        Meta(
            description="when KV runs out, the running request of the last rank gives it up: recompute computes it "
            "again later, swap moves it to host memory of limits.kv_swap_bytes and back (recompute if that is full)"
        ),
    ] = "recompute"
    watermark: Annotated[
        float,
        Meta(ge=0, lt=1, description="share of the KV kept free of new requests while others run"),
    ] = 0.0


class ChunkedOptions(IterationOptions, frozen=True):
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="most tokens computed in one step, decodes first", extra={"unit": "tokens"})
    ] = 512
    max_chunk_tokens: (
        Annotated[
            int,
            Meta(
                ge=1, description="most tokens of one prompt in one step; null: the budget", extra={"unit": "tokens"}
            ),
        ]
        | None
    ) = None


class WholeOrChunkedOptions(IterationOptions, frozen=True):
    chunked: Annotated[bool, Meta(description="split prompts over steps to stay inside max_num_batched_tokens")] = (
        False
    )


class PriorityOptions(WholeOrChunkedOptions, frozen=True):
    ageing_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds of waiting that make up for one class of priority (smaller is more urgent): a "
            "request is overtaken only by more urgent ones that arrive within that time per class after it",
            extra=Seconds,
        ),
    ] = 30.0


class ShortestFirstOptions(WholeOrChunkedOptions, frozen=True):
    length: Annotated[
        Literal["prompt", "output", "total", "predicted"],
        Meta(
            description="what is short: the prompt, max_new_tokens, both together, or the output as predicted from "
            "requests that ended before in this repeat: a weighted mean, the newest counting 0.2, over the same "
            "tenant, category and power of two of prompt tokens, else over tenant and category, else over all; at "
            "most max_new_tokens, which counts while none has ended"
        ),
    ] = "total"
    ageing_s_per_token: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds of waiting that make up for one token of length: a request is overtaken only by "
            "shorter ones that arrive within that time per token of the difference after it; a length is fixed, and "
            "predicted, when a request is queued",
            extra={"unit": "s/token"},
        ),
    ] = 0.01


class FairShareOptions(WholeOrChunkedOptions, frozen=True):
    weights: Annotated[
        dict[str, Weight], Meta(description="share of each tenant (or category) relative to the others; 1 otherwise")
    ] = {}
    output_weight: Annotated[
        float, Meta(gt=0, description="what an output token costs a tenant, relative to a prompt token")
    ] = 2.0


class ClassBudgetsOptions(IterationOptions, frozen=True):
    budgets: Annotated[
        dict[str, Tokens],
        Meta(description="most prompt tokens a step of each category; decodes are not limited"),
    ] = {}
    default_budget: Annotated[
        int, Meta(ge=1, description="the same for all other categories together", extra={"unit": "tokens"})
    ] = 512

    def __post_init__(self) -> None:
        if "" in self.budgets:
            raise ValueError("budgets: '' stands for requests of no category, whose budget is default_budget")


class SloAwareOptions(IterationOptions, frozen=True):
    ttft_s: Annotated[float, Meta(gt=0, description="limit of the time to first token", extra=Seconds)] = 1.0
    tpot_s: Annotated[float, Meta(gt=0, description="limit of the time per output token", extra=Seconds)] = 0.1
    quantile: Annotated[
        float, Meta(gt=0, lt=1, description="share of steps that the predictions have to stay above")
    ] = 0.99


def _needs(options: IterationOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:swap", "limits:kv_swap_bytes"} if options.preemption == "swap" else ())


def _provides(options: IterationOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"scheduler:swap"} if options.preemption == "swap" else ())


def _shared(options: IterationOptions, most: int) -> dict[str, Any]:
    return {
        "max_num_seqs": min(options.max_num_seqs, most),
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "swap": options.preemption == "swap",
        "watermark": options.watermark,
    }


def _dynamic(options: DynamicOptions, most: int) -> Any:
    from infermix.toolkit.request_batches import RequestBatchScheduler

    return RequestBatchScheduler(min(options.batch_size, most), options.max_wait_s)


def _chunked_prefill(options: ChunkedOptions, most: int) -> Any:
    from infermix.toolkit.iteration import IterationScheduler

    return IterationScheduler(**_shared(options, most), chunked=True, max_chunk_tokens=options.max_chunk_tokens)


def _priority(options: PriorityOptions, most: int) -> Any:
    from infermix.toolkit.iteration import IterationScheduler

    from infermix_schedulers.ageing import priority_queue

    queue = priority_queue(options.ageing_s)
    return IterationScheduler(**_shared(options, most), chunked=options.chunked, waiting=queue)


def _shortest_first(options: ShortestFirstOptions, most: int) -> Any:
    from infermix.toolkit.iteration import IterationScheduler

    from infermix_schedulers.ageing import shortest_queue
    from infermix_schedulers.predicted import PredictedShortestScheduler

    if options.length == "predicted":
        token_s = options.ageing_s_per_token
        return PredictedShortestScheduler(**_shared(options, most), chunked=options.chunked, token_s=token_s)
    queue = shortest_queue(options.length, options.ageing_s_per_token)
    return IterationScheduler(**_shared(options, most), chunked=options.chunked, waiting=queue)


def _fair_share(options: FairShareOptions, most: int) -> Any:
    from infermix_schedulers.fair import FairShareScheduler

    return FairShareScheduler(
        **_shared(options, most),
        chunked=options.chunked,
        weights=options.weights,
        output_weight=options.output_weight,
    )


def _class_budgets(options: ClassBudgetsOptions, most: int) -> Any:
    from infermix_schedulers.class_budgets import ClassBudgetScheduler

    return ClassBudgetScheduler(**_shared(options, most), budgets=options.budgets, default=options.default_budget)


def _slo_aware(options: SloAwareOptions, most: int) -> Any:
    from infermix_schedulers.slo_aware import SloAwareScheduler

    return SloAwareScheduler(
        **_shared(options, most), ttft_s=options.ttft_s, tpot_s=options.tpot_s, quantile=options.quantile
    )


def _iteration(name: str, summary: str, build: Any, options: type[IterationOptions]) -> Component:
    return Component(
        name=name,
        role=Role.SCHEDULER,
        summary=summary,
        build=build,
        options=options,
        needs=_needs,
        provides=_provides,
    )


@hookimpl
def infermix_scheduler() -> list[Component]:
    return [
        Component(
            name="dynamic",
            role=Role.SCHEDULER,
            summary="a batch starts when it is full or its first request waited long enough, and runs to its end",
            build=_dynamic,
            options=DynamicOptions,
        ),
        _iteration(
            "chunked_prefill",
            "a token budget per step, decodes first, prompts in pieces",
            _chunked_prefill,
            ChunkedOptions,
        ),
        _iteration(
            "priority",
            "the most urgent class first, with ageing; the least urgent, latest one is preempted",
            _priority,
            PriorityOptions,
        ),
        _iteration(
            "shortest_first",
            "the shortest request first, with ageing; the longest, latest one is preempted",
            _shortest_first,
            ShortestFirstOptions,
        ),
        _iteration(
            "fair_share",
            "the tenant that was served least goes first (virtual token counter)",
            _fair_share,
            FairShareOptions,
        ),
        _iteration(
            "class_budgets",
            "chunked prefill with a token budget per step for each class of requests",
            _class_budgets,
            ClassBudgetsOptions,
        ),
        _iteration(
            "slo_aware",
            "the largest batch and chunks that keep TPOT and TTFT limits, from measured step times",
            _slo_aware,
            SloAwareOptions,
        ),
    ]
