"""Prompts in one process, outputs in another: the same tokens as one engine, and the record says how KV came."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.errors import InfermixError, Unsupported, UserError
from infermix.measure.drive import drive
from infermix.plugins import Catalogue
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.request import Request, SamplingParams
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource
from infermix_disaggregated import transfer
from infermix_disaggregated.device_memory import DeviceBlock
from infermix_disaggregated.messages import Computed
from infermix_reference.kv_paged import PagedLayout

Build = Callable[..., Any]


@pytest.fixture
def build(catalogue: Catalogue, tiny_llama: Any) -> Any:
    """`build("disaggregated", parts={...}, **context)`."""
    built = []

    def make(
        name: str, parts: dict[str, tuple[str, dict[str, Any]]] | None = None, options: Any = None,
        device: str = "cpu", **given: Any,
    ) -> Any:  # fmt: skip
        def choose(role: Role, part: str, options: dict[str, Any]) -> Choice:
            registered = catalogue.find(role, part)
            return Choice(registered, registered.component.options(**options))

        wanted = {**{role: (part, {}) for role, part in DEFAULT_PARTS.items()}, **(parts or {})}
        source = resolve_source(ModelSource(source=str(tiny_llama)), tiny_llama)
        context = EngineContext(
            source=source, facts=read_model_facts(source, dtype="float32", dummy=False),
            machine=machine_facts(device), dtype="float32",
            parts={role: choose(role, *wanted[role.value]) for role in PART_ROLES},
            max_model_len=128, max_num_seqs=4, seed=0, clock_ns=time.perf_counter_ns, find=catalogue.find, **given,
        )  # fmt: skip
        engine = choose(Role.ENGINE, name, dict(options or {}))
        built.append(engine.component.build(engine.options, context))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


def requests(count: int = 8) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            prompt_ids=tuple((7 * index + place) % 90 + 6 for place in range(3 + 9 * (index % 3))),
            sampling=SamplingParams(
                max_new_tokens=1 + (5 * index) % 12,
                temperature=0.7 * (index % 2),
                seed=index,
                ignore_eos=index % 3 > 0,
            ),
        )
        for index in range(count)
    ]


def outputs(engine: Any, asked: list[Request]) -> dict[str, tuple[list[int], str]]:
    repeat = drive(engine, asked, None, keep_outputs=len(asked))
    return {sample.request_id: (sample.output_ids, sample.finish_reason) for sample in repeat.requests}


def test_two_workers_give_the_tokens_of_one_engine(build: Any) -> None:
    asked = requests()
    alone = outputs(build("native"), asked)
    engine = build("disaggregated")
    assert outputs(engine, asked) == alone
    counters = engine.report().counters
    handed = [request for request in asked if len(alone[request.request_id][0]) > 1]
    assert counters["handovers"] == len(handed) > 3
    assert counters["handover_bytes"] > 0
    assert counters["handover_export_s"] > 0
    assert counters["handover_import_s"] > 0
    way = {"path": "shared host memory", "device_refused": "KV is on cpu", "workers": 2}
    assert engine.report().executed["engine"]["handover"] == way
    decoded = sum(len(tokens) - 1 for tokens, _ in alone.values())
    assert counters["computed_tokens"] == decoded, "the decode worker computes no prompt"
    assert counters["prefill_computed_tokens"] == sum(len(request.prompt_ids) for request in asked)
    engine.reset()
    assert engine.report().counters.get("prefill_computed_tokens", 0) == 0
    assert outputs(engine, asked) == alone
    with pytest.raises(UserError, match="needs"):
        engine.submit(Request(request_id="long", prompt_ids=(7,) * 500))


@pytest.mark.full
def test_kv_that_finds_no_room_waits(build: Any) -> None:
    asked = requests()
    alone = outputs(build("native"), asked)
    parts = {"kv": ("paged", {"block_size": 4}), "scheduler": ("continuous", {"max_num_seqs": 2})}
    engine = build("disaggregated", parts, kv_memory_bytes=2 * 80_000)
    assert outputs(engine, asked) == alone


def test_what_the_prefix_cache_of_the_prefill_worker_found_is_counted(build: Any) -> None:
    prompt = tuple(range(6, 70))
    asked = [
        Request(request_id=name, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=3, ignore_eos=True))
        for name in ("first", "again")
    ]
    engine = build("disaggregated", {"kv": ("paged", {"block_size": 4, "prefix_cache": "radix"})})
    for request in asked:
        outputs(engine, [request])
    counters = engine.report().counters
    assert (counters["prefix_queries"], counters["prefix_queried_tokens"]) == (2, 2 * len(prompt))
    assert counters["prefix_hits"] == 1
    assert counters["prefill_computed_tokens"] == 2 * len(prompt) - counters["prefix_hit_tokens"]


def test_both_workers_swap(build: Any) -> None:
    asked = requests()
    alone = outputs(build("native"), asked)
    parts = {
        "kv": ("paged", {"block_size": 4}),
        "scheduler": ("continuous", {"max_num_seqs": 4, "preemption": "swap"}),
    }
    engine = build("disaggregated", parts, kv_memory_bytes=2 * 80_000, kv_swap_bytes=200_000)
    assert outputs(engine, asked) == alone
    assert engine.report().executed["engine"]["swap_host_bytes"] <= 100_000


@pytest.mark.full
def test_a_dead_worker_is_told(build: Any) -> None:
    engine = build("disaggregated")
    engine._prefill._process.kill()
    with pytest.raises(InfermixError, match="prefill worker ended"):
        drive(engine, requests(3), None)


@pytest.mark.parametrize("kv", ["none", "hybrid", "sink_window", "h2o", "snapkv"])
def test_layouts_that_cannot_be_handed_over_are_refused(build: Any, kv: str) -> None:
    """What a layout has dropped, or would drop next, is not in its blocks."""
    with pytest.raises(Unsupported, match=f"kv '{kv}' does not provide kv:export"):
        build("disaggregated", {"kv": (kv, {})})


@pytest.mark.full
def test_a_device_that_is_no_gpu_is_refused(build: Any) -> None:
    with pytest.raises(Unsupported, match="handover: device: KV is on cpu"):
        build("disaggregated", options={"handover": "device"})


def test_a_parcel_that_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but CUDA's handles."""
    kept: dict[bytes, Any] = {}

    def share(data: Any) -> DeviceBlock:
        kept[name := str(len(kept)).encode()] = data
        return DeviceBlock(
            size=data.numel(), device=0, memory=name, storage_bytes=data.numel(), memory_offset=0, counter=b"",
            counter_offset=0, event=b"", wait=False,
        )  # fmt: skip

    monkeypatch.setattr(transfer, "share", share)
    monkeypatch.setattr(transfer, "opened", lambda block: kept.pop(block.memory))
    layout = PagedLayout(4)
    groups = (KVGroup((0, 2), 2, 8, 8), KVGroup((1,), 1, 12, 4))
    shape = layout.shape(groups, KVBudget(3, 40, 4))
    spaces, stores = (
        [layout.space(shape) for _ in range(2)],
        [layout.store(shape, "cpu", torch.float32) for _ in "ab"],
    )
    for tensor in (tensor for store in stores for tensor in store.block_tensors()):
        tensor.copy_(torch.randn(tensor.shape))
    assert spaces[0].reserve(5, 30)
    assert spaces[1].reserve(6, 11)
    assert spaces[0].reserve(1, 18)
    sent = transfer.send(stores[0], spaces[0], shape, "paged", 1, 18, on_device=True)
    reply = msgspec.json.decode(
        msgspec.json.encode(Computed(request_id="1", token=3, stopped=False, parcel=sent)), type=Computed
    )
    assert reply.parcel == sent
    assert transfer.place(stores[1], spaces[1], shape, "paged", transfer.receive(reply.parcel), 2)
    mine, yours = list(spaces[0].block_table(1)), list(spaces[1].block_table(2))
    for here, there in zip(stores[0].block_tensors(), stores[1].block_tensors(), strict=True):
        assert torch.equal(here[mine], there[yours])
    assert sent.device is not None
    kept[sent.device.memory] = torch.zeros(7, dtype=torch.uint8)
    with pytest.raises(InfermixError, match="bytes are no KV parcel"):
        transfer.receive(sent)
    transfer.discard(Computed(request_id="1", token=3, stopped=True))


@pytest.mark.gpu
def test_kv_stays_on_the_gpu(build: Any) -> None:
    asked = requests()
    alone = outputs(build("native", device="cuda"), asked)
    engine = build("disaggregated", options={"handover": "device"}, device="cuda")
    assert outputs(engine, asked) == alone
    assert engine.report().executed["engine"]["handover"]["path"] == "device memory of both (CUDA IPC)"
    assert engine.report().counters["handover_bytes"] > 0
    engine.reset()
    assert outputs(engine, asked) == alone
