"""Trace files: what is read, where they are found, and what is refused."""

from __future__ import annotations

import pytest

from tokenflow_sgl.workload.arrivals import plan_requests
from tokenflow_sgl.workload.scenario import ScenarioError, load_scenario, parse_scenario
from tokenflow_sgl.workload.traces import TraceError, TraceRow, find_trace, read_trace

CSV = "arrival_s,prompt_tokens,output_tokens\n0.000,374,44\n4.315,396,109\n4.315,55,16\n"
SCENARIO = """
name = "traced"
about = "rows of a trace"
newcomers = ["rows"]

[gpu]
hardware = "h200"
model = "llama3-8b"
kv_pool_tokens = 160
page_tokens = 16
chunked_prefill_tokens = 8192
max_running = 256
host_ratio = 2

[[group]]
name = "rows"
start_s = 1
arrival = "trace"
file = "t.csv"
read_rate = [{ tok_s = 6, weight = 1 }]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENFLOW_TRACES", raising=False)
    (tmp_path / "t.csv").write_text(CSV)
    return tmp_path


def load(folder, text=SCENARIO):
    (folder / "traced.toml").write_text(text)
    return load_scenario(folder / "traced.toml")


def test_rows_are_read_one_by_one_in_order(folder):
    assert list(read_trace(folder / "t.csv")) == [
        TraceRow(0.0, 374, 44),
        TraceRow(4.315, 396, 109),
        TraceRow(4.315, 55, 16),
    ]
    assert len(list(read_trace(folder / "t.csv", limit=2))) == 2


def test_nothing_behind_the_limit_is_looked_at(folder):
    (folder / "t.csv").write_text(CSV + "not,a,row\n")
    assert len(list(read_trace(folder / "t.csv", limit=3))) == 3
    with pytest.raises(TraceError):
        list(read_trace(folder / "t.csv", limit=4))


def test_sessions_and_blank_lines_and_the_mark_of_a_spreadsheet_are_understood(folder):
    text = "\ufeffarrival_s,session_id,prompt_tokens,output_tokens\r\n1,28,580,549\r\n\r\n2.5,,3,4\r\n"
    (folder / "s.csv").write_bytes(text.encode())
    assert list(read_trace(folder / "s.csv")) == [TraceRow(1.0, 580, 549, "28"), TraceRow(2.5, 3, 4, "")]


@pytest.mark.parametrize(
    ("was", "becomes", "line", "says"),
    [
        ("arrival_s", "arrival", 1, "header: 'arrival,prompt_tokens,output_tokens'"),
        (",output_tokens", ",output_tokens,output_tokens", 1, "header"),
        (CSV, "", 1, "header: ''"),
        ("396", "3x6", 3, "prompt_tokens: '3x6'"),
        ("396", "0", 3, "prompt_tokens: '0'"),
        ("109", "-1", 3, "output_tokens: '-1'"),
        ("109", "1.5", 3, "output_tokens: '1.5'"),
        ("109", "9" * 40, 3, "output_tokens: '999"),
        ("109", "", 3, "output_tokens: ''"),
        ("396,109", "396", 3, "2 fields: '4.315,396'"),
        ("4.315,396", "nan,396", 3, "arrival_s: 'nan'"),
        ("4.315,396", "-1,396", 3, "arrival_s: '-1'"),
        ("4.315,396", "soon,396", 3, "arrival_s: 'soon'"),
        ("4.315,55", "4.314,55", 4, "arrival_s: '4.314', valid: seconds >= 4.315"),
        ("55", '"55', 4, "not CSV"),
    ],
)
def test_a_wrong_row_is_refused_with_file_line_field_value_and_what_is_valid(folder, was, becomes, line, says):
    assert was in CSV
    (folder / "t.csv").write_text(CSV.replace(was, becomes))
    with pytest.raises(TraceError) as refused:
        list(read_trace(folder / "t.csv"))
    message = str(refused.value)
    assert message.startswith(f"{folder / 't.csv'} line {line}: ") and says in message and "valid" in message, message


def test_bytes_that_are_no_text_are_refused(folder):
    (folder / "t.csv").write_bytes(CSV.encode() + b"\xff,1,1\n")
    with pytest.raises(TraceError, match=r"t\.csv from line \d+ on: not text"):
        list(read_trace(folder / "t.csv"))


def test_a_trace_beside_the_scenario_comes_before_one_in_the_folder_of_traces(folder, monkeypatch):
    far = folder / "far"
    far.mkdir()
    (far / "t.csv").write_text(CSV)
    (far / "only.csv").write_text(CSV)
    assert find_trace("only.csv", beside=folder) is None
    monkeypatch.setenv("TOKENFLOW_TRACES", str(far))
    assert find_trace("only.csv", beside=folder) == far / "only.csv"
    assert find_trace("t.csv", beside=folder) == folder / "t.csv"
    assert find_trace("t.csv", beside=None) == far / "t.csv"
    assert find_trace(str(folder / "t.csv"), beside=None) == folder / "t.csv"
    assert find_trace(str(folder / "no.csv"), beside=folder) is None


def test_requests_of_a_trace_have_its_times_and_lengths(folder):
    requests = plan_requests(load(folder), seed=3)
    assert [(r.rid, r.sent_s, r.prompt_len, r.answer_tokens) for r in requests] == [
        ("s3-rows-000", 1.0, 374, 44),
        ("s3-rows-001", 5.315, 396, 109),
        ("s3-rows-002", 5.315, 55, 16),
    ]
    assert {r.read_rate_tok_s for r in requests} == {6.0}


def test_scale_and_limit_and_the_limit_of_answers_apply_to_a_trace(folder):
    more = 'file = "t.csv"\nscale = 2\nlimit = 2\nmax_tokens = 109'
    scenario = load(folder, SCENARIO.replace('file = "t.csv"', more))
    assert [(r.sent_s, r.max_tokens) for r in plan_requests(scenario, seed=1)] == [(1.0, 109), (9.63, 109)]


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ('file = "gone.csv"', "group[0].file", "gone.csv"),
        ('file = ""', "group[0].file", "''"),
        ('file = "t.csv"\nscale = 0', "group[0].scale", "0"),
        ('file = "t.csv"\nlimit = 0', "group[0].limit", "0"),
        ('file = "t.csv"\nmax_tokens = 108', "group[0].max_tokens", "108"),
        ('file = "t.csv"\nprompt_tokens = [1, 2]', "group[0].prompt_tokens", "unknown key"),
        ('file = "t.csv"\nsession = { turns = [1, 1] }', "group[0].session", "unknown key"),
        ('file = "t.csv"\ncount = 3', "group[0].count", "unknown key"),
        ('file = "empty.csv"', "group[0].file", "empty.csv"),
    ],
)
def test_a_wrong_trace_group_is_refused_with_field_value_and_what_is_valid(folder, more, field, value):
    (folder / "empty.csv").write_text("arrival_s,prompt_tokens,output_tokens\n")
    with pytest.raises(ScenarioError) as refused:
        load(folder, SCENARIO.replace('file = "t.csv"', more))
    message = str(refused.value)
    assert message.startswith(f"{field}:") and value in message and "valid" in message, message


def test_a_missing_trace_says_where_it_was_looked_for():
    with pytest.raises(ScenarioError, match="beside the scenario, or in the folder that the variable TOKENFLOW_TRACES"):
        parse_scenario(SCENARIO)


def test_the_hash_names_the_trace_too(folder):
    before = load(folder).sha256
    assert load(folder).sha256 == before
    (folder / "t.csv").write_text(CSV.replace("55", "56"))
    assert load(folder).sha256 != before
