"""What `tokenflow sim`, `size` and the paper's runner refuse, and how they stop: in one line, before the work."""

from __future__ import annotations

import json

import pytest

from bench.test_simulate import TINY
from tokenflow_sgl.bench import paper, simulate, size
from tokenflow_sgl.bench.run import parse_seeds
from tokenflow_sgl.sim.run import SimulationStuck
from tokenflow_sgl.workload.scenario import load_scenario

SIZE = ["--model", "llama3-8b", "--gpu", "rtx4090"]
EMPTY = TINY.replace("count = 6\n", "for_s = 0.001\nper_s = 0.01\n").replace(
    "count = 8\n", "for_s = 0.001\nper_s = 0.01\n"
)
EMPTY = EMPTY.replace('"uniform"\nover_s = 1', '"poisson"')


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(newcomers='["short"]'))
    return path


@pytest.fixture
def idle(monkeypatch):
    """Nothing may be simulated."""

    def never(*_, **__):
        raise AssertionError("simulated")

    monkeypatch.setattr(simulate, "compare", never)
    monkeypatch.setattr(size, "size_gpu", never)


def one_line(capsys):
    err = capsys.readouterr().err.strip()
    assert "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "sglang-fcfs,tokenflow, sglang-fcfs"], "policy: 'sglang-fcfs' twice in 'sglang-fcfs,tok"),
        (["--policy", "nope"], "tokenflow-no-forecast, distserve, or all"),
        (["--policy", ""], "policy: '', valid: "),
        (["--seeds", "9" * 5000], "seeds: '999"),
        (
            ["--seeds", "99999999999999999999999"],
            "seeds: '99999999999999999999999', valid: how many (3 = seeds 1,2,3), up",
        ),
        (["--seeds", "1000001"], "up to 1000000"),
        (["--max-tokens-factor", "1e300"], "max-tokens-factor: 1e+300, valid: a number >= 1, up to 1e+06"),
        (["--json", ""], "json: '', empty, valid: a file that can be written"),
        (["--json", "/proc/x/y"], "json: '/proc/x/y', "),
        (["--json", "n" * 5000], "File name too long, valid: a file"),
        (["--json", "/"], "json: '/', a folder, valid: a file"),
    ],
)
def test_sim_refuses_by_name_before_it_simulates(tiny, idle, argv, message, capsys):
    assert simulate.main([str(tiny), *argv, "--quiet"]) == 2
    line = one_line(capsys)
    assert message in line and len(line) < 600


def test_an_output_below_a_file_is_refused_and_a_check_leaves_no_file(tiny, idle, tmp_path, capsys):
    assert simulate.main([str(tiny), "--json", str(tiny / "x")]) == 2
    assert "valid: a file that can be written" in one_line(capsys)
    with pytest.raises(AssertionError, match="simulated"):
        simulate.main([str(tiny), "--json", str(tmp_path / "new" / "out.json")])
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--json", "/proc/x/y"], "json: '/proc/x/y', "),
        (["--json", ""], "json: '', empty"),
        (["--plot", "/proc/x"], "plot: '/proc/x', "),
        (["--model", ""], "model: '', valid: "),
    ],
)
def test_size_refuses_by_name_before_it_simulates(idle, argv, message, capsys):
    assert size.main([*SIZE, *argv]) == 2
    assert message in one_line(capsys)


def test_size_prints_its_json_as_sim_does(monkeypatch, capsys):
    monkeypatch.setattr(size, "size_gpu", lambda *_, policy, **__: size.Size(policy, 1000, None, ()))
    assert size.main([*SIZE, "--json", "-"]) == 1  # no rate meets the level
    assert [s["policy"] for s in json.loads(capsys.readouterr().out)["sizes"]] == list(size.POLICIES)


@pytest.mark.parametrize(("main", "name"), [(simulate.main, "sim"), (size.main, "size")])
def test_an_interrupt_is_one_line(tiny, monkeypatch, main, name, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "compare", interrupted)
    monkeypatch.setattr(size, "size_gpu", interrupted)
    assert main([str(tiny)] if name == "sim" else SIZE) == 130
    assert one_line(capsys) == f"tokenflow {name}: interrupted"


def test_a_simulation_that_is_stuck_is_one_line_with_policy_and_seed(tiny, monkeypatch, capsys):
    def stuck(*_, **__):
        raise SimulationStuck("at 1.0 s: 3 wait, 16 tokens free")

    monkeypatch.setattr(simulate, "run_one", stuck)
    assert simulate.main([str(tiny), "--seeds", "4,", "--quiet"]) == 1
    assert one_line(capsys) == "tokenflow sim: tiny-burst, sglang-fcfs, seed 4: stuck at 1.0 s: 3 wait, 16 tokens free"


def test_a_scenario_in_which_nobody_comes_is_refused_with_the_seed(tmp_path, capsys):
    path = tmp_path / "empty.toml"
    path.write_text(EMPTY.format(newcomers='["short"]'))
    assert simulate.main([str(path), "--seeds", "7,", "--quiet"]) == 2
    assert "group: no request arrives in tiny-burst with seed 7, valid: " in one_line(capsys)
    out = tmp_path / "out"
    assert paper.main(["--scenarios", str(path), "--seeds", "1", "--workers", "1", "--out", str(out)]) == 1
    assert (out / "summary.md").is_file()


def test_newcomers_of_whom_none_came_have_no_row(tmp_path, capsys):
    path = tmp_path / "some.toml"
    head, tail = TINY.format(newcomers='["short"]').split('name = "short"\ncount = 8')
    path.write_text(
        f'{head}name = "short"\nfor_s = 0.001\nper_s = 0.01{tail}'.replace(
            "over_s = 1\nprompt_tokens = [50", "prompt_tokens = [50"
        )
    )
    text = path.read_text()
    at = text.rindex('"uniform"')
    path.write_text(text[:at] + '"poisson"' + text[at + 9 :])
    assert simulate.main([str(path), "--seeds", "1", "--json", "-", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["tokenflow"]["newcomers"] is None


def test_requests_that_fail_do_not_make_the_printed_bound_false(tmp_path, capsys):
    path = tmp_path / "big.toml"
    big = '[[group]]\nname = "big"\nclass = "batch"\ncount = 1\nstart_s = 0\narrival = "uniform"\nover_s = 0\n'
    path.write_text(
        TINY.format(newcomers="[]") + big + "prompt_tokens = [5000, 5000]\nanswer_tokens = [100000, 100000]\n"
    )
    argv = [str(path), "--seeds", "1", "--json", "-", "--quiet", "--policy", "sglang-fcfs,tokenflow,distserve"]
    assert simulate.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    for row in found["results"].values():
        assert row["failed"] == 1
        assert row["effective_goodput_tok_s"] <= found["bounds"]["effective_goodput_tok_s"]


@pytest.mark.parametrize("text", ["1000001", f"1,{10**13}", "-1", "0"])
def test_seeds_are_refused_by_name(text):
    with pytest.raises(ValueError, match=f"seeds: '{text}', valid: how many"):
        parse_seeds(text)


# ---- the paper's runner


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(paper, "RIVALS", {"sglang-fcfs": None, "tokenflow": None})


def arguments(tmp_path, *scenarios):
    names = ",".join(map(str, scenarios))
    return ["--scenarios", names, "--seeds", "1", "--out", str(tmp_path / "out"), "--workers", "1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out", "/proc/x"], "out: '/proc/x', "),
        (["--out", "{tiny}"], "valid: a folder that can be written to"),
        (["--seeds", "1001"], "--seeds 1001: valid are 1 to 1000"),
        (["--workers", "0"], "--workers 0: valid are 1 to 256"),
        (["--scenarios", "{tiny},{other}"], "name: 'tiny-burst' in "),
    ],
)
def test_the_paper_refuses_by_name(tiny, tmp_path, argv, message, capsys):
    other = tmp_path / "other.toml"
    other.write_text(tiny.read_text() + "# another\n")
    with pytest.raises(SystemExit) as ended:
        paper.main([*arguments(tmp_path, tiny), *(a.format(tiny=tiny, other=other) for a in argv)])
    assert ended.value.code == 2
    assert message in one_line(capsys)


def test_the_same_file_twice_is_run_once(tiny):
    assert list(paper.scenarios_of([str(tiny), str(tiny)])) == ["tiny-burst"]


def test_what_is_no_result_is_made_again(tiny, tmp_path, few, capsys):
    argv = arguments(tmp_path, tiny)
    assert paper.main(argv) == 0
    run = tmp_path / "out" / "runs" / "tiny-burst" / "tokenflow-seed1.json"
    good = json.loads(run.read_text())
    for bad in ([], None, 3, "x", {"key": good["key"]}, {**good, "row": {}}, {**good, "bounds": None}):
        run.write_text(json.dumps(bad))
        capsys.readouterr()
        assert paper.main(argv) == 0
        assert "3 runs, 2 of them done" in capsys.readouterr().out
        assert json.loads(run.read_text()) == good


def test_a_file_edited_while_the_paper_runs_does_not_reach_its_results(tiny, tmp_path, few, monkeypatch):
    submit = paper._submit

    def edited(*args):
        tiny.write_text("not TOML at all [")
        return submit(*args)

    monkeypatch.setattr(paper, "_submit", edited)
    assert paper.main(arguments(tmp_path, tiny)) == 0


def test_an_interrupted_paper_keeps_what_is_done_and_says_how_to_go_on(tiny, tmp_path, few, monkeypatch, capsys):
    def first_alone(under_way):
        yield next(iter(real(under_way)))
        raise KeyboardInterrupt

    real = paper.as_completed
    monkeypatch.setattr(paper, "as_completed", first_alone)
    assert paper.main(arguments(tmp_path, tiny)) == 130
    assert "paper: interrupted; run again to go on" in one_line(capsys)
    assert "tiny-burst" in (tmp_path / "out" / "summary.md").read_text()
    monkeypatch.setattr(paper, "as_completed", real)
    assert paper.main(arguments(tmp_path, tiny)) == 0
    assert "3 runs, 1 of them done" in capsys.readouterr().out


def test_every_scenario_that_comes_with_the_package_is_filed_under_its_name():
    assert all(load_scenario(name).name == name for name in simulate.simulated())
