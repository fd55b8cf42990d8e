"""`tokenflow sim`, `size` and the paper's runner: what people type, what they get, what is refused."""

from __future__ import annotations

import json

import pytest

from tokenflow_sgl.bench import paper, simulate, size
from tokenflow_sgl.workload.scenario import load_scenario

TINY = """
name = "tiny-burst"
about = "a dozen requests against a small pool"
newcomers = {newcomers}
[gpu]
hardware = "rtx4090"
model = "llama3-8b"
kv_pool_tokens = 4096
page_tokens = 16
chunked_prefill_tokens = 2048
max_running = 64
host_ratio = 4
[[group]]
name = "long"
count = 6
start_s = 0
arrival = "uniform"
over_s = 1
prompt_tokens = [100, 200]
answer_tokens = [300, 400]
read_rate = [{{ tok_s = 6, weight = 1 }}]
[[group]]
name = "short"
count = 8
start_s = 4
arrival = "uniform"
over_s = 1
prompt_tokens = [50, 100]
answer_tokens = [20, 40]
read_rate = [{{ tok_s = 6, weight = 1 }}]
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(newcomers='["short"]'))
    return path


def test_the_json_is_the_benchs_schema_with_bounds(tiny, capsys):
    assert (
        simulate.main(
            [str(tiny), "--policy", "sglang-fcfs,tokenflow,distserve", "--seeds", "2", "--json", "-", "--quiet"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"scenario", "seeds", "provenance", "results", "bounds"}
    assert found["scenario"] == "tiny-burst" and found["seeds"] == [1, 2]
    assert list(found["results"]) == ["sglang-fcfs", "tokenflow", "distserve"]
    wanted = {
        *("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "stall_count", "stall_total_s", "stall_longest_s"),
        *("effective_goodput_tok_s", "effective_throughput_tok_s", "raw_throughput_tok_s", "qoe_mean"),
        *("completion_mean_s", "completion_p99_s", "requests", "failed", "parks", "resumes", "per_seed"),
    }
    for row in found["results"].values():
        assert wanted <= set(row)
        assert row["requests"] == 28 and row["failed"] == 0 and len(row["per_seed"]) == 2
        assert row["ttft_p99_s"] >= found["bounds"]["ttft_p99_s"] > 0
        assert row["effective_goodput_tok_s"] <= found["bounds"]["effective_goodput_tok_s"]


def test_the_same_command_gives_the_same_results(tiny, capsys):
    def results():
        assert simulate.main([str(tiny), "--seeds", "1", "--json", "-", "--quiet"]) == 0
        return json.loads(capsys.readouterr().out)["results"]

    assert results() == results()


def test_clients_that_ask_for_more_than_they_get_are_simulated_too(tiny, capsys):
    # SGLang reserves for what was asked, so that its newcomers wait longer; answers stay as long as they are.
    def result(factor):
        argv = [str(tiny), "--policy", "sglang-fcfs", "--seeds", "1", "--json", "-", "--quiet"]
        assert simulate.main([*argv, "--max-tokens-factor", factor]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["results"]["sglang-fcfs"], found["provenance"]

    (one, one_facts), (four, four_facts) = result("1"), result("4")
    assert four["ttft_mean_s"] > one["ttft_mean_s"] and four["failed"] == 0
    assert (one_facts["max_tokens_factor"], four_facts["max_tokens_factor"]) == (1.0, 4.0)


def test_the_table_has_every_policy_and_the_bounds(tiny, capsys, tmp_path):
    out = tmp_path / "deep" / "out.json"
    assert simulate.main([str(tiny), "--seeds", "1", "--json", str(out), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "sglang-fcfs" in text and "tokenflow" in text and "newcomers' TTFT, P99 s" in text
    assert "no server's P99 TTFT" in text
    assert json.loads(out.read_text())["scenario"] == "tiny-burst"


def test_a_scenario_that_singles_out_nobody_has_a_table_too(tmp_path, capsys):
    path = tmp_path / "all.toml"
    path.write_text(TINY.format(newcomers="[]"))
    assert simulate.main([str(path), "--seeds", "1", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "newcomers'" not in text and "all TTFT, P99 s" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "scenario: 'nowhere', valid: "),
        (["demo-burst"], "gpu: missing in demo-burst, valid: a scenario with a [gpu] table"),
        (["guide-burst-4x", "--policy", "best"], "policy: 'best', valid: sglang-fcfs, "),
        (["guide-burst-4x", "--seeds", "0"], "seeds: '0', valid: "),
        (["guide-burst-4x", "--max-tokens-factor", "0.5"], "max-tokens-factor: 0.5, valid: a number >= 1"),
        (["guide-burst-4x", "--max-tokens-factor", "nan"], "max-tokens-factor: nan, valid: a number >= 1"),
    ],
)
def test_bad_input_names_field_value_and_what_is_valid(argv, message, capsys):
    assert simulate.main([*argv, "--quiet"]) == 2
    assert message in capsys.readouterr().err


def test_the_list_names_what_can_be_simulated(capsys):
    assert simulate.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"guide-burst-4x", "paper-4090-a", "multiturn-10k", "mixed-classes"} <= set(names)
    assert "demo-burst" not in names


# ---- the paper's runner


def test_a_finished_run_is_not_made_again_and_an_old_one_is(tmp_path, tiny, capsys, monkeypatch):
    monkeypatch.setattr(paper, "RIVALS", {"sglang-fcfs": None, "tokenflow": None})
    argv = ["--scenarios", str(tiny), "--seeds", "1", "--out", str(tmp_path / "out"), "--workers", "1"]
    assert paper.main(argv) == 0
    assert "3 runs, 0 of them done" in capsys.readouterr().out
    assert paper.main(argv) == 0
    assert "3 runs, 3 of them done" in capsys.readouterr().out
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| tokenflow |" in summary and "| distserve |" in summary
    monkeypatch.setattr(paper, "source_key", lambda: "another simulator")
    assert paper.main(argv) == 0
    assert "3 runs, 0 of them done" in capsys.readouterr().out


def test_the_quick_scenarios_exist_and_the_huge_one_has_one_seed():
    assert all(load_scenario(name).gpu for name in paper.QUICK)
    units = list(paper.units_of([load_scenario(paper.HUGE)], seeds=5))
    assert {u.seed for u in units} == {1} and tuple(u.policy for u in units) == paper.STRONGEST


# ---- sizing


def test_sizing_tells_streams_memory_and_flags(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenflow_sgl.sim.size._STEPS", 3)
    monkeypatch.setattr("tokenflow_sgl.sim.size._TURNS", 0.1)
    argv = [
        "--model",
        "llama3-8b",
        "--gpu",
        "rtx4090",
        "--arrivals",
        "20",
        "--prompt-tokens",
        "200",
        "--answer-tokens",
        "150",
    ]
    assert size.main([*argv, "--json", str(tmp_path / "size.json"), "--plot", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "--mem-fraction-static 0.85" in text and "--hicache-size" in text and "GPUs" in text
    found = json.loads((tmp_path / "size.json").read_text())
    best = found["sizes"][1]["best"]
    assert best["ttft_p99_s"] <= 1.0 and best["stalled"] <= 0.01
    assert any(p["per_s"] == best["per_s"] for p in found["sizes"][1]["points"])
    assert (tmp_path / "size-rtx4090-llama3-8b.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "llama3-8b", "--gpu", "tpu"], "tpu"),
        (["--model", "gpt", "--gpu", "h200"], "gpt"),
        (["--model", "llama3-8b", "--gpu", "h200", "--read-rate", "0"], "read-rate: 0.0, valid: 0.1 to 1000"),
        (["--model", "qwen2.5-32b", "--gpu", "rtx4090"], "mem_fraction: 0.85, valid: none"),
    ],
)
def test_sizing_refuses_by_name(argv, message, capsys):
    assert size.main(argv) == 2
    assert message in capsys.readouterr().err
