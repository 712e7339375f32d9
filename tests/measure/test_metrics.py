from __future__ import annotations

import math

import pytest
from infermix.errors import UserError
from infermix.measure.metrics import summarise
from infermix.record.record import Repeat, RequestSample


def sample(name: str, arrival_s: float, *emissions: tuple[float, int], **changes) -> RequestSample:
    fields = {
        "request_id": name,
        "arrival_s": arrival_s,
        "sent_s": arrival_s,
        "input_tokens": 10,
        "emissions": list(emissions),
        "finish_reason": "length",
    }
    return RequestSample(**{**fields, **changes})


#: Request a: TTFT 1, E2E 3, 5 tokens, TPOT 0.5. b: arrival 1, sent 1.5, TTFT 2, E2E 6, 3 tokens, TPOT 2.
A = sample("a", 0.0, (1.0, 1), (2.0, 2), (3.0, 2))
B = sample("b", 1.0, (3.0, 1), (4.0, 1), (7.0, 1), sent_s=1.5, input_tokens=30)
REPEAT = Repeat(wall_s=8.0, requests=[A, B])


def values(*repeats: Repeat, **goodput: float) -> dict[str, float]:
    return {name: metric.value for name, metric in summarise(repeats, goodput).items()}


def test_throughput_by_hand() -> None:
    found = values(REPEAT)
    assert found["output_tokens_per_s"] == 1.0
    assert found["input_tokens_per_s"] == 5.0
    assert found["total_tokens_per_s"] == 6.0
    assert found["requests_per_s"] == 0.25
    assert found["tokens_per_emission"] == pytest.approx(8 / 6)
    assert found["failed_share"] == 0.0
    assert "goodput_rps" not in found


def test_latencies_by_hand() -> None:
    found = values(REPEAT)
    assert found["ttft_s_mean"] == 1.5
    assert found["ttft_from_send_s_mean"] == pytest.approx((1.0 + 1.5) / 2)
    assert found["e2e_s_mean"] == 4.5
    assert found["tpot_s_mean"] == pytest.approx((0.5 + 2.0) / 2)
    assert found["itl_s_mean"] == pytest.approx((1 + 1 + 1 + 3) / 4)
    # linear percentiles of two values: low + p (high - low)
    assert found["e2e_s_p50"] == pytest.approx(4.5)
    assert found["e2e_s_p90"] == pytest.approx(3 + 0.9 * 3)
    assert found["e2e_s_p99"] == pytest.approx(3 + 0.99 * 3)
    # of the gaps 1, 1, 1, 3: rank 0.9 * 3 = 2.7 lies between the third and the fourth
    assert found["itl_s_p90"] == pytest.approx(1 + 0.7 * 2)


def test_e2e_is_ttft_and_tpot() -> None:
    found = values(Repeat(wall_s=8.0, requests=[B]))
    assert found["e2e_s_mean"] == pytest.approx(found["ttft_s_mean"] + found["tpot_s_mean"] * 2)


def test_one_token_has_no_tpot() -> None:
    single = sample("c", 0.0, (1.0, 1))
    assert not [name for name in values(Repeat(wall_s=1.0, requests=[single])) if name.startswith(("tpot", "itl"))]
    assert values(Repeat(wall_s=1.0, requests=[single, A]))["tpot_s_mean"] == 0.5


def test_all_tokens_in_one_emission_took_no_time() -> None:
    assert values(Repeat(wall_s=1.0, requests=[sample("c", 0.0, (1.0, 4))]))["tpot_s_mean"] == 0.0


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({"ttft_s": 1.0}, 1),
        ({"ttft_s": 0.99}, 0),
        ({"ttft_s": 2.0}, 2),
        ({"ttft_s": 2.0, "tpot_s": 1.0}, 1),
        ({"itl_s": 2.9}, 1),
        ({"e2e_s": 6.0}, 2),
        ({"e2e_s": 6.0, "ttft_s": 1.5, "tpot_s": 0.5, "itl_s": 1.0}, 1),
    ],
)
def test_goodput_counts_what_met_every_limit(limits: dict[str, float], met: int) -> None:
    assert values(REPEAT, **limits)["goodput_rps"] == met / 8.0


def test_goodput_leaves_out_failures_and_empty_outputs_but_not_single_tokens() -> None:
    failed = sample("f", 0.0, (0.1, 1), finish_reason="error")
    requests = [failed, sample("e", 0.0), sample("s", 0.0, (0.1, 1))]
    assert values(Repeat(wall_s=1.0, requests=requests), tpot_s=1.0)["goodput_rps"] == 1.0


def test_failures_count_in_their_share_alone() -> None:
    failed = sample("f", 0.0, (50.0, 1), finish_reason="abort", input_tokens=1000)
    found = values(Repeat(wall_s=8.0, requests=[A, B, failed]))
    assert found.pop("failed_share") == pytest.approx(1 / 3)
    expected = values(REPEAT)
    del expected["failed_share"]
    assert found == expected


def test_only_failures() -> None:
    failed = sample("f", 0.0, finish_reason="error")
    found = values(Repeat(wall_s=0.0, requests=[failed]))
    assert found == {"failed_share": 1.0}


def test_one_value_per_repeat_and_the_interval_over_them() -> None:
    repeats = [Repeat(wall_s=wall, requests=[A, B]) for wall in (8.0, 4.0, 2.0)]
    metric = summarise(repeats)["output_tokens_per_s"]
    assert metric.samples == [1.0, 2.0, 4.0]
    assert metric.value == pytest.approx(2.0)
    assert metric.ci_low is not None
    assert metric.ci_high is not None
    # on logarithms: t(0.975, 2) = 4.302653, s = ln 2
    half = 4.302653 * math.log(2) / 3**0.5
    assert metric.ci_high == pytest.approx(2 * math.exp(half), rel=1e-6)
    assert metric.ci_low == pytest.approx(2 * math.exp(-half), rel=1e-6)


def test_one_repeat_has_no_interval() -> None:
    metric = summarise([REPEAT])["ttft_s_p50"]
    assert (metric.ci_low, metric.ci_high) == (None, None)


def test_units_and_directions() -> None:
    metrics = summarise([REPEAT], {"ttft_s": 1.0})
    assert (metrics["output_tokens_per_s"].unit, metrics["output_tokens_per_s"].better) == ("tokens/s", "higher")
    assert (metrics["goodput_rps"].unit, metrics["goodput_rps"].better) == ("requests/s", "higher")
    assert (metrics["tpot_s_p99"].unit, metrics["tpot_s_p99"].better) == ("s", "lower")
    assert (metrics["tokens_per_emission"].better, metrics["failed_share"].better) == ("none", "lower")


def test_an_unknown_goodput_limit_is_refused() -> None:
    with pytest.raises(UserError, match=r"measure.goodput.tpt_s: .*did you mean 'tpot_s'"):
        summarise([REPEAT], {"tpt_s": 1.0})


def test_time_per_token_of_each_category() -> None:
    samples = [
        sample("a", 0.0, (1.0, 1), (2.0, 1), category="qa"),
        sample("b", 0.0, (1.0, 1), (4.0, 1), category="qa"),
        sample("c", 0.0, (1.0, 1), (1.5, 1), category="rag"),
        sample("d", 0.0, (1.0, 1), (1.5, 1)),
    ]
    metrics = summarise([Repeat(wall_s=5.0, requests=samples)])
    assert metrics["tpot_s_mean[qa]"].value == pytest.approx(2.0)
    assert metrics["tpot_s_mean[rag]"].value == pytest.approx(0.5)
    assert metrics["tpot_s_mean[qa]"].unit == "s"
