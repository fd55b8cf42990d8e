"""Values that are out of all proportion, and files that are not what they should be: one line that names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenflow_sgl.sim.hardware import HARDWARE_DIR, load_hardware, load_model
from tokenflow_sgl.sim.world import world_of
from tokenflow_sgl.workload.scenario import ScenarioError, load_scenario, parse_scenario

GOOD = """
name = "mini"
about = "one group"
newcomers = []
[gpu]
hardware = "rtx4090"
model = "llama3-8b"
kv_pool_tokens = 1600
page_tokens = 16
chunked_prefill_tokens = 512
max_running = 8
host_ratio = 4
[[group]]
name = "all"
start_s = 0
arrival = "poisson"
per_s = 2.0
for_s = 30
prompt_tokens = [10, 20]
answer_tokens = [30, 40]
session = { turns = [1, 2], think_s = 1, shared_prefixes = 3, shared_tokens = [5, 6] }
read_rate = [{ tok_s = 6, weight = 1 }]
"""
CONFIG = {
    **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    **{"intermediate_size": 128, "vocab_size": 1000},
}


def refusal(was, becomes):
    assert was in GOOD
    with pytest.raises(ScenarioError) as refused:
        parse_scenario(GOOD.replace(was, becomes))
    message = str(refused.value)
    assert "\n" not in message and len(message) < 600, message
    return message


@pytest.mark.parametrize(
    ("was", "becomes", "field"),
    [
        ("for_s = 30", f"count = {10**30}", "group[0].count"),
        ("for_s = 30", "count = 10000001", "group[0].count"),
        ("for_s = 30", "for_s = 1e299", "group[0].for_s"),
        ("for_s = 30", "for_s = 1e7", "group[0].for_s"),  # at 2 a second: 20 million requests
        ("start_s = 0", "start_s = 1e299", "group[0].start_s"),
        ("per_s = 2.0", "per_s = 1e9", "group[0].per_s"),
        ("per_s = 2.0", "per_s = 1e-9", "group[0].per_s"),
        ("tok_s = 6", "tok_s = 1e-300", "group[0].read_rate[0].tok_s"),
        ("[10, 20]", f"[10, {10**30}]", "group[0].prompt_tokens"),
        ("shared_prefixes = 3", "shared_prefixes = 100000000", "group[0].session.shared_prefixes"),
        ("think_s = 1", "think_s = 1e8", "group[0].session.think_s"),
        ('"poisson"', '"onoff"\non_mean_s = 1e-300\noff_mean_s = 1', "group[0].on_mean_s"),
        ('"poisson"', '"onoff"\non_mean_s = 1\noff_mean_s = 1e300', "group[0].off_mean_s"),
        ("max_running = 8", f"max_running = {'9' * 400}", "gpu.max_running"),
        ("max_running = 8", f"max_running = 0x{'f' * 9000}", "gpu.max_running"),
        ("max_running = 8", f"max_running = {'9' * 9000}", "scenario"),
        ("chunked_prefill_tokens = 512", "chunked_prefill_tokens = 15", "gpu.chunked_prefill_tokens"),
    ],
)
def test_a_number_out_of_all_proportion_is_refused_by_name(was, becomes, field):
    assert refusal(was, becomes).startswith(f"{field}: ")


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", ".hidden", "a b", "a\\u001bb", "a\\nb", "", "n" * 5000])
def test_a_name_that_is_no_plain_file_name_is_refused(name):
    assert refusal('"mini"', f'"{name}"').startswith("name: ")


def test_memory_that_holds_no_page_is_refused_with_what_it_holds():
    # 0.7 of 24 GiB less 16.06 GB of weights, at 131,072 bytes a token: some 15,000 tokens.
    text = GOOD.replace("kv_pool_tokens = 1600", "mem_fraction = 0.7").replace(
        "page_tokens = 16", "page_tokens = 65536"
    )
    scenario = parse_scenario(text.replace("chunked_prefill_tokens = 512", "chunked_prefill_tokens = 65536"))
    with pytest.raises(ScenarioError, match=r"^gpu: mem_fraction: 0.7, valid: .* a page \(65536 tokens\), it leaves"):
        world_of(scenario)


# ---- files


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(GOOD.replace("one group", "\u00e9").encode("latin-1"))
    with pytest.raises(ScenarioError, match=r"^scenario: '.*latin.toml', not text"):
        load_scenario(path)
    with pytest.raises(ValueError, match=r"latin.toml', not text"):
        load_hardware(path)


@pytest.mark.parametrize("load", [load_scenario, load_hardware, load_model])
@pytest.mark.parametrize("name", ["n" * 5000, f"{'n' * 5000}.toml", ""])
def test_a_name_that_no_file_can_have_is_refused(load, name):
    with pytest.raises(ValueError, match="valid: ") as refused:
        load(name)
    assert len(str(refused.value)) < 1000


def test_hardware_and_model_files_are_looked_up_beside_the_scenario(tmp_path, monkeypatch):
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "here" / "own.toml").write_text((HARDWARE_DIR / "h200.toml").read_text())
    (tmp_path / "here" / "model" / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "here" / "mini.toml"
    path.write_text(GOOD.replace('"rtx4090"', '"own.toml"').replace('"llama3-8b"', '"model"'))
    monkeypatch.chdir(tmp_path)
    assert world_of(load_scenario("here/mini.toml")).store_bytes_s == load_hardware("h200").pcie_bytes_s


@pytest.mark.parametrize("file", ["own.toml", "config.json"])
def test_a_scenario_of_another_gpu_has_another_hash(tmp_path, monkeypatch, file):
    (tmp_path / "own.toml").write_text((HARDWARE_DIR / "h200.toml").read_text())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    path = Path("mini.toml")
    path.write_text(GOOD.replace('"rtx4090"', '"own.toml"').replace('"llama3-8b"', '"config.json"'))
    before = load_scenario(path).sha256
    assert load_scenario(path).sha256 == before
    (tmp_path / file).write_text((tmp_path / file).read_text() + "\n")
    assert load_scenario(path).sha256 != before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", 5),
        ("layer_types", [1, "x"]),
        ("layer_types", [{}]),
        ("num_hidden_layers", 10**400),
        ("vocab_size", 10**19),
    ],
)
def test_a_models_odd_field_is_refused_by_name(tmp_path, field, value):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, field: value}))
    with pytest.raises(ValueError, match=f"config.json: {field}: "):
        load_model(path)


def test_memory_of_400_digits_is_refused_by_name(tmp_path):
    path, text = tmp_path / "own.toml", (HARDWARE_DIR / "h200.toml").read_text()
    start = text.index("value = ", text.index("[memory_bytes]"))
    path.write_text(text[:start] + f"value = {'9' * 400} #" + text[start:])
    with pytest.raises(ValueError, match=r"memory_bytes.value: 999"):
        load_hardware(path)


def test_a_file_of_tables_in_tables_without_end_is_refused():
    assert refusal('name = "mini"', f"name = {'[' * 5000}{']' * 5000}").startswith(
        "scenario: not TOML (maximum recursion"
    )
