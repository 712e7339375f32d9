"""The checks of KV layouts, schedulers, quantizers and components must catch broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import pytest
import torch
from infermix.plugins import load_catalogue
from infermix.roles.component import Component, Options, Role
from infermix.roles.facts import MachineFacts
from infermix.toolkit.conformance import (
    check_component,
    check_decoder,
    check_kv_layout,
    check_quantizer,
    check_scheduler,
    machine_for,
    not_here,
)
from infermix.toolkit.conformance import component as conformance_component
from infermix.toolkit.conformance.unmasking import MASK
from infermix.toolkit.paged_space import PagedSpace
from infermix.toolkit.pool_store import PagedStore
from infermix_decoders.diffusion import DiffusionDecoder
from infermix_reference.decoder import AutoregressiveDecoder
from infermix_reference.kv_paged import PagedLayout
from infermix_reference.quantizer_none import NoQuantizer
from infermix_reference.scheduler_continuous import ContinuousScheduler
from msgspec import Meta, structs

CATALOGUE = load_catalogue()
CPU_MACHINE = MachineFacts("cpu", "cpu", 1 << 33, 2)


def _mutant(role: Role, name: str, part: Any, **changes: Any) -> Component:
    component = CATALOGUE.find(role, name).component
    return replace(component, build=lambda options, context: part, **changes)


class _LeakySpace(PagedSpace):
    def release(self, seq_id: int) -> None:
        if seq_id in self._tables:
            del self._tables[seq_id][1:2]
        super().release(seq_id)


class _ForgetfulSpace(PagedSpace):
    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> Any:
        super().fork(parent_id, child_id, num_tokens)
        return []


class _FatStore(PagedStore):
    def allocated_bytes(self) -> int:
        return super().allocated_bytes() + 64


class _SwappedStore(PagedStore):
    def write(self, layer_idx: int, k: Any, v: Any, batch: Any, group: Any) -> None:
        super().write(layer_idx, k.flip(0), v, batch, group)


class _Layout(PagedLayout):
    def __init__(self, space: type = PagedSpace, store: type = PagedStore) -> None:
        super().__init__(4)
        self._make = space, store

    def space(self, shape: Any) -> Any:
        return self._make[0](shape)

    def store(self, shape: Any, device: Any, dtype: Any) -> Any:
        return self._make[1](shape, device, dtype)


@pytest.mark.parametrize(
    "layout",
    [
        _Layout(space=_LeakySpace),
        _Layout(space=_ForgetfulSpace),
        _Layout(store=_FatStore),
        _Layout(store=_SwappedStore),
    ],
    ids=["release leaks", "fork forgets the copy", "bytes differ", "tokens swapped"],
)
def test_kv_mutant_is_caught(layout: Any) -> None:
    with pytest.raises(AssertionError):
        check_kv_layout(_mutant(Role.KV, "paged", layout), steps=200)


class _Greedy(ContinuousScheduler):
    """Schedules without reserving."""

    def _make_room(self, *given: Any) -> bool:
        return True


class _Starving(ContinuousScheduler):
    """Serves the newest first and drops nobody, but never the one that waits longest while others run."""

    def _admit(self, plan: Any, space: Any, budget: int, now_s: float) -> None:
        if self.num_waiting > 1:
            super()._admit(plan, space, budget, now_s)


class _Hoarding(ContinuousScheduler):
    """Preempts without giving anything back."""

    def _preempt(self, victim: Any, plan: Any, space: Any) -> None:
        kept = space.held[victim.seq_id]
        super()._preempt(victim, plan, space)
        space.held[victim.seq_id] = kept


@pytest.mark.parametrize("kind", [_Greedy, _Starving, _Hoarding])
def test_scheduler_mutant_is_caught(kind: type[ContinuousScheduler]) -> None:
    component = CATALOGUE.find(Role.SCHEDULER, "continuous").component
    broken = replace(component, build=lambda options, context: kind(context, 2048))
    with pytest.raises(AssertionError):
        check_scheduler(broken)


class _Untying(NoQuantizer):
    def apply(self, model: Any, context: Any) -> Any:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        return super().apply(model, context)


class _Lossy(NoQuantizer):
    def apply(self, model: Any, context: Any) -> Any:
        model.up_proj.weight.data += 1e-3
        return super().apply(model, context)


@pytest.mark.parametrize(("kind", "message"), [(_Untying, "tied head"), (_Lossy, "says lossless")])
def test_quantizer_mutant_is_caught(kind: type, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_quantizer(_mutant(Role.QUANTIZER, "none", kind()))


def test_checks_run_on_the_device_and_in_the_dtypes_of_the_component(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = MachineFacts("cuda", "a GPU", 1 << 34, 2, compute_capability=90)
    monkeypatch.setattr(
        conformance_component, "example_machine", lambda device=None: CPU_MACHINE if device == "cpu" else gpu
    )
    anywhere = CATALOGUE.find(Role.QUANTIZER, "none").component
    halves = {"device:cuda", "dtype:float16|dtype:bfloat16"}
    on_gpu = replace(anywhere, needs=lambda *given: frozenset(halves))
    on_cpu = replace(anywhere, needs=lambda *given: frozenset({"device:cpu"}))
    devices = [machine_for(each, each.options()).device for each in (anywhere, on_gpu, on_cpu)]
    assert devices == ["cuda", "cuda", "cpu"]
    reason = not_here(on_gpu, on_gpu.options(), gpu, "float32")
    assert reason == "none needs dtype:float16|dtype:bfloat16, not float32"
    assert not_here(on_gpu, on_gpu.options(), gpu, "float16") is None
    assert not_here(on_cpu, on_cpu.options(), gpu, "float16") == "none needs device:cpu"


class _Undocumented(Options, frozen=True):
    size: int = 3


class _Documented(Options, frozen=True):
    size: Annotated[int, Meta(description="how many")] | None = None


def test_component_faults_are_caught() -> None:
    good = replace(CATALOGUE.find(Role.KV, "dense").component, options=_Documented)
    check_component(good)
    faults = {
        "no description": {"options": _Undocumented},
        "no summary": {"summary": " "},
        "not frozenset": {"provides": lambda options, model, machine: {"kv:truncate"}},
        "without a prefix": {"needs": lambda options, model, machine: frozenset({"fast"})},
        "weight_bits": {"weight_bits": lambda options: 0.0},
    }
    for message, change in faults.items():
        with pytest.raises(AssertionError, match=message):
            check_component(replace(good, **change))  # type: ignore[arg-type]


def test_decoder_that_changes_a_token_is_caught() -> None:
    class Lossy(AutoregressiveDecoder):
        def collect(self, ticket: Any) -> Any:
            ticket.ids[-1:] += 1
            return super().collect(ticket)

    check_decoder(CATALOGUE.find(Role.DECODER, "autoregressive").component)
    with pytest.raises(AssertionError, match="the model says"):
        check_decoder(_mutant(Role.DECODER, "autoregressive", Lossy()))


class _Remasking(DiffusionDecoder):
    """Masks a sequence again and again."""

    def _num_kept(self, block: Any, confidences: Any) -> int:
        return 0


class _Sociable(DiffusionDecoder):
    """Is in a hurry where it has company."""

    def launch(self, plan: Any, runner: Any, sampler: Any) -> Any:
        self._num_rows = len(plan.entries)
        return super().launch(plan, runner, sampler)

    def _num_kept(self, block: Any, confidences: Any) -> int:
        return self._num_rows


class _Showing(DiffusionDecoder):
    """Emits a mask in place of the last token of every step."""

    def collect(self, ticket: Any) -> Any:
        found = super().collect(ticket)
        return [
            structs.replace(each, token_ids=(*each.token_ids[:-1], self._mask)[: len(each.token_ids)])
            for each in found
        ]


@pytest.mark.parametrize(
    ("kind", "message"),
    [(_Remasking, "have not ended"), (_Sociable, "other tokens than among others"), (_Showing, "a mask among")],
)
def test_decoder_that_fills_in_wrongly_is_caught(kind: type[DiffusionDecoder], message: str) -> None:
    component = CATALOGUE.find(Role.DECODER, "diffusion").component
    check_decoder(component)
    mutant = replace(component, build=lambda options, context: kind(options, MASK))
    with pytest.raises(AssertionError, match=message):
        check_decoder(mutant)
