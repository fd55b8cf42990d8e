"""Every combination that cannot work is refused by name, and what works is left alone."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_sgl.adapter import checks
from tokenflow_sgl.adapter.args import TokenflowSettings

TOKENFLOW = TokenflowSettings()
FCFS = TokenflowSettings(policy="fcfs")

# One value per row that must be refused, beside the stock defaults of SGLang 0.5.23, which must not.
BAD_VALUES: dict[str, Any] = {
    "pd_disaggregation": "prefill",
    "pipeline_parallel": 2,
    "pdmux": True,
    "dllm": "LowConfidence",
    "ray": True,
    "encoder_only": True,
    "embedding": True,
    "dp_attention": 2,
    "dp_attention_old_flag": True,
    "recv_interval": 2,
    "tokenizer_workers": 2,
    "smg_grpc": True,
    "grpc_mode": True,
    "no_radix_cache": True,
    "radix_backend": "flexkv",
    "lmcache": True,
    "flexkv": True,
    "external_linker": True,
    "write_policy": "write_through_selective",
    "host_memory_mode": "buffer_only",
    "hisparse": True,
    "speculative": "EAGLE",
    "strip_thinking_cache": True,
    "language_only": True,
    "priority_preemption": True,
    "schedule_policy": "lpm",
}
ROWS = {check.name: check for check in checks.CHECKS}


def test_every_row_has_a_bad_value_here_and_its_own_name() -> None:
    assert len(ROWS) == len(checks.CHECKS)
    assert set(BAD_VALUES) == set(ROWS)


@pytest.mark.parametrize("name", [n for n, c in ROWS.items() if c.action == checks.REFUSE])
def test_refused_combination_names_flag_value_and_what_to_do(name: str) -> None:
    check, value = ROWS[name], BAD_VALUES[name]
    with pytest.raises(SystemExit) as stopped:
        checks.refuse_or_exit(SimpleNamespace(**{check.field: value}), TOKENFLOW)
    message = str(stopped.value)
    for part in (check.flag, repr(value), check.advice, check.why):
        assert part in message


@pytest.mark.parametrize("name", list(ROWS))
def test_fcfs_refuses_only_what_breaks_the_scheduler_class(name: str) -> None:
    check = ROWS[name]
    refusals, warnings = checks.problems(SimpleNamespace(**{check.field: BAD_VALUES[name]}), FCFS)
    assert bool(refusals) == check.breaks_class
    assert not warnings


def test_write_back_is_refused_too() -> None:
    refusals, _ = checks.problems(SimpleNamespace(hicache_write_policy="write_back"), TOKENFLOW)
    assert "write_back" in refusals[0]


def test_all_refusals_are_told_at_once() -> None:
    with pytest.raises(SystemExit) as stopped:
        checks.refuse_or_exit(SimpleNamespace(pp_size=2, enable_lmcache=True), TOKENFLOW)
    assert "--pp-size" in str(stopped.value) and "--enable-lmcache" in str(stopped.value)


def test_priority_scheduling_is_warned_about_unless_its_preemption_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        checks.refuse_or_exit(SimpleNamespace(enable_priority_scheduling=True), TOKENFLOW)
    assert "--disable-priority-preemption" in caplog.text
    off = SimpleNamespace(enable_priority_scheduling=True, disable_priority_preemption=True)
    assert checks.problems(off, TOKENFLOW) == ([], [])


def test_stock_defaults_and_what_works_pass() -> None:
    from sglang.srt.server_args import ServerArgs

    defaults = ServerArgs(model_path="none")
    assert checks.problems(defaults, TOKENFLOW) == ([], [])
    for allowed in ({"enable_mixed_chunk": True}, {"enable_lora": True}, {"dp_size": 2}, {"tp_size": 2}):
        assert checks.problems(ServerArgs(model_path="none", **allowed), TOKENFLOW) == ([], [])


def test_every_field_of_the_table_exists_in_the_installed_release() -> None:
    from sglang.srt.server_args import ServerArgs

    fields = set(ServerArgs.__struct_fields__)
    assert {c.field for c in checks.CHECKS} | {c.unless for c in checks.CHECKS if c.unless} <= fields


@pytest.mark.parametrize("on", ["1", "True", "yes", "Y"])
def test_rust_http_server_is_refused_however_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", on)
    refusals, _ = checks.problems(SimpleNamespace(), TOKENFLOW)
    assert "SGLANG_RUST_SERVER" in refusals[0]


def loaded(**changes: Any) -> Any:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    tree = UnifiedRadixCache.__new__(UnifiedRadixCache)
    tree.cache_controller = changes.pop("cache_controller", object())
    model = SimpleNamespace(model_path="some/model", is_encoder_decoder=changes.pop("is_encoder_decoder", False))
    facts: dict[str, Any] = {"is_generation": True, "is_hybrid_swa": False, "is_hybrid_ssm": False, "tree_cache": tree}
    return SimpleNamespace(model_config=model, **{**facts, **changes})


def test_plain_model_with_a_host_cache_is_served() -> None:
    checks.refuse_runtime(loaded(), TOKENFLOW)


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"is_hybrid_ssm": True}, "Mamba"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"cache_controller": None}, "without a host tier"),
        ({"tree_cache": SimpleNamespace(cache_controller=object())}, "UnifiedRadixCache"),
        ({"is_generation": False}, "does not generate"),
    ],
)
def test_model_that_cannot_be_parked_is_refused_once_loaded_and_served_under_fcfs(changes: Any, part: str) -> None:
    with pytest.raises(SystemExit, match=part) as stopped:
        checks.refuse_runtime(loaded(**changes), TOKENFLOW)
    assert "some/model" in str(stopped.value)
    if "is_generation" not in changes:
        checks.refuse_runtime(loaded(**changes), FCFS)
