"""Latencies of classes and tenants: from samples to metrics to every format of the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from infermix.measure.metrics import summarise
from infermix.record.record import Record, Repeat, RequestSample
from infermix.report.board import build_board
from infermix.report.html import html
from infermix.report.markdown import markdown
from infermix.report.tabular import json_text


def sample(name: str, first_s: float, category: str, tenant: str = "") -> RequestSample:
    return RequestSample(
        request_id=name, arrival_s=0.0, sent_s=0.0, input_tokens=4, emissions=[(first_s, 1), (first_s + 0.3, 3)],
        finish_reason="length", category=category, tenant=tenant,
    )  # fmt: skip


def repeat(*samples: RequestSample) -> Repeat:
    return Repeat(wall_s=10.0, requests=list(samples))


def test_every_class_and_every_tenant_has_its_own_latencies() -> None:
    metrics = summarise(
        [repeat(sample("a", 1.0, "chat", "x"), sample("b", 2.0, "batch", "y"), sample("c", 4.0, "chat"))]
    )
    assert metrics["ttft_s_p50[chat]"].value == pytest.approx(2.5)
    assert metrics["ttft_s_max[chat]"].value == pytest.approx(4.0)
    assert metrics["ttft_s_max[batch]"].value == pytest.approx(2.0)
    assert metrics["tpot_s_p99[batch]"].value == pytest.approx(0.1)
    assert metrics["ttft_s_max[tenant:x]"].value == pytest.approx(1.0)
    assert metrics["ttft_s_max[tenant:]"].value == pytest.approx(4.0)
    assert (metrics["ttft_s_p99[chat]"].unit, metrics["ttft_s_p99[chat]"].better) == ("s", "lower")


def test_one_tenant_is_no_group_and_failures_count_for_nobody() -> None:
    failed = sample("b", 9.0, "chat")
    failed.finish_reason = "error"
    metrics = summarise([repeat(sample("a", 1.0, "chat", "x"), failed)])
    assert metrics["ttft_s_max[chat]"].value == pytest.approx(1.0)
    assert not any("tenant" in name for name in metrics)


def test_the_leaderboard_shows_them_in_every_format(make_record: Callable[..., Record]) -> None:
    record = make_record()
    record.metrics |= summarise([repeat(sample("a", 1.0, "chat"), sample("b", 2.0, "batch"))])
    board = build_board([record])
    text = markdown(board)
    assert "### By class and tenant" in text
    assert "1 s / 1 s / 1 s" in text or "1.00 s / 1.00 s / 1.00 s" in text, text
    assert "By class and tenant" in html(board)
    (row,) = json.loads(json_text(board))["tables"][0]["rows"]
    assert row["groups"]["ttft_s_max[batch]"] == pytest.approx(2.0)


def test_tables_without_classes_have_no_such_section(make_record: Callable[..., Record]) -> None:
    board = build_board([make_record()])
    assert "By class" not in markdown(board)
    assert "<h3>By class" not in html(board)
