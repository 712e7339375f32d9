"""Replay of traces: lengths, times and shared prefixes as recorded; every bad row is told or counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from infermix.errors import UserError
from infermix.workload.assemble import PreparedWorkload
from infermix.workload.components import Poisson, RequestClass
from infermix.workload.trace import TraceSource
from infermix.workload.trace_components import TraceOptions

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,10,4
2023-11-16 18:15:46.9305900,3,2
2023-11-16 18:16:46.6805900,7,1
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,12,3,15,Conversation log
45,GPT-4,5,0,5,API log
45.5,GPT-4,6,2,8,API log
"""


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


Load = Callable[..., PreparedWorkload]


@pytest.fixture
def load(tmp_path: Path, make_context: Any) -> Load:
    def build(text: str, max_model_len: int = 100, **options: Any) -> PreparedWorkload:
        (tmp_path / "t").write_text(text, encoding="utf-8")
        chosen = TraceOptions(path="t", **options)
        return PreparedWorkload(chosen, 0, TraceSource(chosen, make_context(max_model_len=max_model_len)))

    return build


def shapes(workload: PreparedWorkload, repeat: int = 0) -> list[tuple[float, int, int]]:
    return [
        (round(each.arrival_s, 4), len(each.prompt_ids), each.sampling.max_new_tokens)
        for each in workload.requests(repeat)
    ]


def test_azure_times_and_lengths_are_exact(load: Load) -> None:
    workload = load(AZURE)
    assert shapes(workload) == [(0.0, 10, 4), (0.25, 3, 2), (60.0, 7, 1)]
    assert workload.input_tokens == (3, 10)
    assert workload.counts == {"rows": 3, "requests": 3, "tick_s": 0}
    assert all(request.sampling.ignore_eos for request in workload.requests(0))
    assert workload.requests(0) == workload.requests(3), "repeats are the same unless vary asks for others"


def test_plain_columns_in_any_order(load: Load) -> None:
    text = "output_tokens,arrival_s,note,input_tokens\n2,1.5,x,9\n1,2.0,y,4\n"
    assert shapes(load(text)) == [(0.0, 9, 2), (0.5, 4, 1)]


def test_time_can_be_scaled_cut_and_replaced(load: Load) -> None:
    assert [row[0] for row in shapes(load(AZURE, speed=2.0))] == [0.0, 0.125, 30.0]
    assert shapes(load(AZURE, num_requests=2)) == [(0.0, 10, 4), (0.25, 3, 2)]
    late = load(AZURE, start_s=0.2, duration_s=10.0)
    assert shapes(late) == [(0.0, 3, 2)]
    assert late.counts["outside_window"] == 1
    assert [row[0] for row in shapes(load(AZURE, concurrency=2))] == [0.0, 0.0, 0.0]
    drawn = [row[0] for row in shapes(load(AZURE, arrivals=Poisson(request_rate=5.0)))]
    assert drawn[0] == 0.0
    assert drawn[2] != 60.0


def test_burstgpt_counts_failed_requests_when_told_to(load: Load) -> None:
    with pytest.raises(UserError, match=r"t:3: 'Response tokens' is 0, a request needs at least one token"):
        load(BURSTGPT)
    workload = load(BURSTGPT, bad_rows="skip")
    assert shapes(workload) == [(0.0, 12, 3), (40.5, 6, 2)]
    assert workload.counts["no_tokens"] == 1
    assert [request.category for request in workload.requests(0)] == ["ChatGPT", "GPT-4"]


def test_equal_hash_ids_are_equal_tokens_in_whole_blocks(load: Load) -> None:
    text = mooncake((0, 10, 2, [0, 1, 2]), (0, 8, 2, [0, 1]), (1000, 12, 1, [0, 7, 1]), (2500, 3, 1, [9]))
    prompts = [request.prompt_ids for request in load(text, block_tokens=4).requests(0)]
    assert [len(prompt) for prompt in prompts] == [10, 8, 12, 3]
    assert prompts[0][:8] == prompts[1]
    assert prompts[2][:4] == prompts[0][:4]
    assert prompts[2][4:8] != prompts[0][4:8]
    assert prompts[2][8:] == prompts[0][4:8], "a block is the same wherever it stands"
    assert len({prompts[0][:4], prompts[0][4:8], prompts[3] + (0,)}) == 3


def test_scaled_lengths_keep_what_is_shared(load: Load) -> None:
    text = mooncake((0, 1200, 90, [0, 1, 2]), (0, 1024, 1, [0, 1]))
    workload = load(text, max_model_len=1000, length_scale=0.1)
    prompts = [request.prompt_ids for request in workload.requests(0)]
    assert shapes(workload)[0][2] == 9
    assert [len(prompt) for prompt in prompts] == [2 * 51 + 18, 2 * 51]
    assert prompts[0][: 2 * 51] == prompts[1]


def test_arrivals_of_a_tick_are_spread_over_it(load: Load) -> None:
    rows = [(3000 * tick - (tick % 2), 4, 1, [tick * 50 + index]) for tick in range(4) for index in range(50)]
    workload = load(mooncake(*rows), block_tokens=4)
    times = [request.arrival_s for request in workload.requests(0)]
    assert workload.counts["tick_s"] == 3
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    for tick in range(4):
        inside = times[50 * tick : 50 * tick + 50]
        assert max(inside) - min(inside) > 2
        assert all(3 * tick - 1 <= time < 3 * tick + 3 for time in inside)
    exact = load(mooncake(*rows), block_tokens=4, tick_s=0.0)
    assert {round(request.arrival_s, 3) for request in exact.requests(0)} == {0.0, 2.999, 6.0, 8.999}
    poisson = load(mooncake((0, 4, 1, [0]), (1234, 4, 1, [1])), block_tokens=4)
    assert [request.arrival_s for request in poisson.requests(0)] == [0.0, 1.234]


def test_too_long_is_refused_clipped_or_skipped_and_counted(load: Load) -> None:
    text = "arrival_s,input_tokens,output_tokens\n0,10,5\n1,95,20\n2,40,60\n3,5,200\n"
    with pytest.raises(
        UserError, match=r"t:3: workload.too_long: 95 prompt and 20 output tokens are too long: a seq"
    ):
        load(text)
    skipped = load(text, too_long="skip")
    assert shapes(skipped) == [(0.0, 10, 5), (2.0, 40, 60)]
    assert skipped.counts["too_long_skipped"] == 2
    clipped = load(text, too_long="clip")
    assert shapes(clipped) == [(0.0, 10, 5), (1.0, 80, 20), (2.0, 40, 60), (3.0, 1, 99)]
    assert (clipped.counts["clipped_inputs"], clipped.counts["clipped_outputs"]) == (2, 1)
    bounded = load(text, too_long="clip", max_input_tokens=20, max_output_tokens=8)
    assert [row[1:] for row in shapes(bounded)] == [(10, 5), (20, 8), (20, 8), (5, 8)]
    with pytest.raises(UserError, match="every request of this trace is too long"):
        load(text, too_long="skip", max_output_tokens=1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "t: workload.path: the trace is empty"),
        ("arrival_s,input_tokens,output_tokens\n", "t: workload.path: the trace has no rows"),
        ("a,b\n1,2\n", r"t:1: workload.format: these are the columns of no known trace; the file has a, b"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n2,1,1\n1.5,1,1\n", "t:4: the time is 0.5 s before that"),
        ("arrival_s,input_tokens,output_tokens\n-1,1,1\n", "t:2: the time -1 s is negative"),
        ("arrival_s,input_tokens,output_tokens\n0,x,1\n", "t:2: 'input_tokens' is 'x'"),
        ("arrival_s,input_tokens,output_tokens\n0,1.5,1\n", "t:2: 'input_tokens' is '1.5'"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "t:2: there is no 'output_tokens'"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", "t:2: 'arrival_s' is 'nan', no finite time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "t:2: 'TIMESTAMP' is 'yesterday'"),
        ('{"TIMESTAMP": 5, "ContextTokens": 1, "GeneratedTokens": 1}\n', "t:1: 'TIMESTAMP' is 5"),
        ("arrival_s,input_tokens,output_tokens\n0,1," + "5" * 200_000 + "\n", "t:2: not CSV: field larger"),
        ("arrival_s,input_tokens,output_tokens,output_tokens\n0,1,2,3\n", "t:1: 2 columns are called 'output"),
        ("arrival_s,input_tokens,output_tokens\n0,1,024,5\n", "t:2: there are more values than columns"),
        (mooncake((0, 6, True, [1])), "t:1: 'output_length' is True"),
        ('{"timestamp": 0\n', "t:1: not JSON"),
        (mooncake((0, 600, 1, [1])), "t:1: 1 hash ids for a prompt of 600 tokens in blocks of 512"),
        (mooncake((0, 6, 1, ["a"])), r"t:1: 'hash_ids' is \['a'\], not a list of whole numbers"),
    ],
)  # fmt: skip
def test_faults_name_file_and_line(load: Load, tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        load(text)
    assert str(caught.value).startswith(str(tmp_path / "t"))
    assert "\n" not in str(caught.value)


def test_text_that_stops_being_text_is_told(tmp_path: Path) -> None:
    """Far behind what is read to open the file."""
    text = b"arrival_s,input_tokens,output_tokens\n" + b"0,10,5\n" * 20_000
    (tmp_path / "t").write_bytes(text + b"1,\xff,5\n")
    with pytest.raises(UserError, match=r"t: workload.path: not UTF-8 text, somewhere behind line \d+"):
        TraceOptions(path="t").check(tmp_path)


@pytest.mark.parametrize("times", [
    ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", "2024-05-10 00:00:02.25+00:00"),
    ("2024-05-10T00:00:00.00993Z", "2024-05-10T00:00:01Z", "2024-05-10T00:00:02.2500000Z"),
    ("2024-05-10 00:00:00.009930", "2024-05-10 02:00:01+02:00", "2024-05-09 23:00:02.25-0100"),
])  # fmt: skip
def test_dates_may_have_an_offset(load: Load, times: tuple[str, ...]) -> None:
    """As those of Azure's traces of 2024."""
    rows = "".join(f"{time},5,1\n" for time in times)
    workload = load("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert [row[0] for row in shapes(workload)] == [0.0, 0.9901, 2.2401]


def test_a_trace_slowed_down_for_ever_is_refused(load: Load) -> None:
    workload = load(AZURE, speed=1e-300)
    with pytest.raises(UserError, match=r"workload: a request would arrive after .* s, 1e\+09 s are the most"):
        workload.requests(0)


def test_a_named_format_says_which_column_is_missing(load: Load) -> None:
    with pytest.raises(
        UserError, match=r"t:1: workload.format: column 'ContextTokens' is missing; the file has TIMESTAMP"
    ):
        load("TIMESTAMP,x\n", format="azure")


def test_skipped_rows_are_counted_by_reason(load: Load) -> None:
    rows = ["0,5,1", "3,5,1", "2,5,1", "4,,1", "5,0,1", "6,5,x", "7,5,1"]
    workload = load("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n", bad_rows="skip")
    assert [row[0] for row in shapes(workload)] == [0.0, 3.0, 7.0]
    reasons = {"out_of_order": 1, "missing_value": 1, "no_tokens": 1, "not_a_number": 1}
    assert workload.counts == {"rows": 7, "requests": 3, "tick_s": 0, **reasons}
    assert workload.counts["rows"] == workload.counts["requests"] + sum(reasons.values())


def test_an_index_without_a_name_is_no_category(load: Load) -> None:
    """The first column of what pandas writes; a comma at the end of a row is no value."""
    workload = load(",arrival_s,input_tokens,output_tokens\n0,0,5,1\n1,3,6,2,\n")
    assert shapes(workload) == [(0.0, 5, 1), (3.0, 6, 2)]
    assert {request.category for request in workload.requests(0)} == {""}


def test_rows_with_a_thousands_separator_are_counted(load: Load) -> None:
    workload = load("arrival_s,input_tokens,output_tokens\n0,5,1\n1,1,024,5\n", bad_rows="skip")
    assert workload.counts["too_many_values"] == 1
    assert shapes(workload) == [(0.0, 5, 1)]


def test_check_reads_the_file_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"workload.path: there is no such file"):
        TraceOptions(path="missing.csv").check(tmp_path)
    (tmp_path / "t").write_text("arrival_s,input_tokens,output_tokens\n0,1,x\n")
    with pytest.raises(UserError, match="t:2"):
        TraceOptions(path="t").check(tmp_path)


def test_classes_are_drawn_by_share_and_leave_the_rest_alone(load: Load) -> None:
    text = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{index},5,1\n" for index in range(400))
    classes = (RequestClass(share=3, priority=2, tenant="a"), RequestClass(category="urgent"))
    plain, mixed = load(text).requests(0), load(text, classes=classes).requests(0)
    assert [each.prompt_ids for each in plain] == [each.prompt_ids for each in mixed]
    assert [each.sampling for each in plain] == [each.sampling for each in mixed]
    assert {(each.priority, each.tenant, each.category) for each in mixed} == {(2, "a", ""), (0, "", "urgent")}
    assert sum(each.tenant == "a" for each in mixed) == pytest.approx(300, abs=30)


def test_copies_follow_each_other_and_share_no_cached_prefix(load: Load) -> None:
    """A copy begins a mean gap (30 s) after the last arrival of the one before; its prompts are the same."""
    workload = load(AZURE, copies=3, num_requests=7)
    requests = workload.requests(0)
    assert [round(each.arrival_s, 2) for each in requests] == [0, 0.25, 60, 90, 90.25, 150, 180]
    assert [each.cache_salt for each in requests] == ["", "", "", "copy 1", "copy 1", "copy 1", "copy 2"]
    assert requests[3].prompt_ids is requests[0].prompt_ids
    assert workload.counts["requests"] == 7
    assert len({each.request_id for each in requests}) == 7
