"""Flags are made from PolicyConfig, judged by it, and reach the scheduler whichever way the server is started."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_sgl.adapter import args
from tokenflow_sgl.core.config import PolicyConfig


def parse(*argv: str) -> args.TokenflowSettings:
    parser = argparse.ArgumentParser()
    args.add_flags(parser)
    return args.settings_from_namespace(parser.parse_args(argv))


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        parse(*argv)
    return capsys.readouterr().err


def test_every_policy_setting_has_its_own_flag_with_unit_bounds_default_and_meaning_in_help() -> None:
    parser = argparse.ArgumentParser()
    args.add_flags(parser)
    text = " ".join(parser.format_help().split())
    flags = [args.flag_of(f.name) for f in dataclasses.fields(PolicyConfig)]
    assert len(set(flags)) == len(flags)
    for f in dataclasses.fields(PolicyConfig):
        assert args.flag_of(f.name) in text
        assert f"default {f.default}]" in text
        assert " ".join(f.metadata["help"].split()[:3]) in text
    assert "--tokenflow-default-read-rate" in text and "tok/s" in text
    assert "--tokenflow-delta X" in text  # no unit suffix in the name


def test_no_flag_gives_the_defaults() -> None:
    assert parse() == args.TokenflowSettings()


def test_flags_reach_the_settings() -> None:
    got = parse("--tokenflow-policy", "fcfs", "--tokenflow-default-read-rate", "8", "--tokenflow-max-parks", "3")
    assert got.policy == "fcfs"
    assert got.config == PolicyConfig(default_read_rate_tok_s=8.0, max_parks=3)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "fast", ""])
def test_bad_value_is_refused_with_flag_value_and_what_is_valid(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, "--tokenflow-default-read-rate", value)
    assert "--tokenflow-default-read-rate" in text
    assert "0.1 to 1000" in text or "is not a number" in text


def test_fraction_for_a_whole_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not an integer" in refusal(capsys, "--tokenflow-max-parks", "1.5")


def test_unknown_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice" in refusal(capsys, "--tokenflow-policy", "magic")


def test_script_and_scripted_policy_need_each_other(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"parks": []}')
    assert parse("--tokenflow-policy", "scripted", "--tokenflow-script", str(script)).script() == {"parks": []}
    with pytest.raises(ValueError, match="need each other"):
        parse("--tokenflow-policy", "scripted")
    with pytest.raises(ValueError, match="need each other"):
        parse("--tokenflow-script", str(script))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_script_that_cannot_be_used_is_refused_at_launch(tmp_path: Path, content: str | None) -> None:
    script = tmp_path / "script.json"
    if content is not None:
        script.write_text(content)
    with pytest.raises(ValueError, match="script"):
        parse("--tokenflow-policy", "scripted", "--tokenflow-script", str(script))


def test_journal_into_a_missing_directory_is_refused_at_launch(tmp_path: Path) -> None:
    assert parse("--tokenflow-journal", str(tmp_path / "j.jsonl")).journal_path == str(tmp_path / "j.jsonl")
    with pytest.raises(ValueError, match="its directory does not exist"):
        parse("--tokenflow-journal", str(tmp_path / "no" / "j.jsonl"))


def test_settings_survive_the_way_into_a_spawned_scheduler() -> None:
    settings = parse("--tokenflow-min-slack", "3.5", "--tokenflow-check-plans")
    server_args = SimpleNamespace()
    args.attach(server_args, settings)
    assert args.settings_of(pickle.loads(pickle.dumps(server_args))) == settings


def test_engine_without_a_command_line_is_configured_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert args.settings_of(SimpleNamespace()) == args.TokenflowSettings()
    monkeypatch.setenv(args.ENV_CONFIG, json.dumps({"policy": "fcfs", "min_slack_s": 4}))
    got = args.settings_of(SimpleNamespace())
    assert (got.policy, got.config.min_slack_s) == ("fcfs", 4)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(args.ENV_CONFIG, json.dumps({"min_slack_s": 4, "max_parks": 9}))
    got = parse("--tokenflow-min-slack", "5")
    assert (got.config.min_slack_s, got.config.max_parks) == (5.0, 9)


@pytest.mark.parametrize("text", ["{", "[]", '{"mu": "x"}', '{"no_such": 1}', '{"policy": "magic"}'])
def test_bad_environment_is_refused_with_its_value(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(args.ENV_CONFIG, text)
    with pytest.raises(ValueError):
        args.settings_of(SimpleNamespace())


class StubServerArgs:
    """What from_cli_args makes: a record of the namespace."""

    def __init__(self, namespace: argparse.Namespace) -> None:
        self.enable_hierarchical_cache = namespace.enable_hierarchical_cache


def launched(*argv: str, **upstream: Any) -> Any:
    parser = argparse.ArgumentParser()
    args.add_flags(parser)
    namespace = parser.parse_args(argv)
    vars(namespace).update({"enable_hierarchical_cache": False, **upstream})
    return args.around_from_cli_args(lambda cls, ns: cls(ns), StubServerArgs, namespace)


@pytest.mark.parametrize("policy, on", [("tokenflow", True), ("fcfs", False)])
def test_host_cache_is_turned_on_where_streams_are_parked_and_left_alone_under_fcfs(policy: str, on: bool) -> None:
    server_args = launched("--tokenflow-policy", policy)
    assert server_args.enable_hierarchical_cache is on
    assert args.settings_of(server_args).policy == policy


def test_combination_that_cannot_work_ends_the_launch_before_upstream_resolves_it() -> None:
    with pytest.raises(SystemExit, match="--disable-radix-cache"):
        launched(disable_radix_cache=True)


def test_settings_error_ends_the_launch_with_the_flag() -> None:
    with pytest.raises(SystemExit, match="--tokenflow-script"):
        launched("--tokenflow-policy", "scripted")


@pytest.mark.parametrize("left", ["j", "j.rank0", "j.dp1.rank0"])
def test_a_launch_never_writes_over_a_journal(tmp_path: Path, left: str) -> None:
    args._keep_old_journals(args.TokenflowSettings(journal_path=str(tmp_path / "j")))
    (tmp_path / left).write_text("what happened")
    with pytest.raises(SystemExit, match=f"--tokenflow-journal=.*{left} exists"):
        args._keep_old_journals(args.TokenflowSettings(journal_path=str(tmp_path / "j")))


@pytest.mark.parametrize(
    ("flag", "value", "valid"),
    [
        ("--tokenflow-stall-limit", "-1", "0 to 86400"),
        ("--tokenflow-stall-limit", "nan", "0 to 86400"),
        ("--tokenflow-sse-comments", "3601", "0 to 3600"),
        ("--tokenflow-origins", "chat.example.com", "https://chat.example.com"),
        ("--tokenflow-origins", "https://a.example.com/page", "https://chat.example.com"),
        ("--tokenflow-origins", "https://a.example.com https://b.example.com", "with commas"),
    ],
)
def test_a_bad_setting_of_the_http_side_is_refused_with_flag_value_and_what_is_valid(
    flag: str, value: str, valid: str
) -> None:
    with pytest.raises(ValueError, match=flag) as refused:
        parse(flag, value)
    assert valid in str(refused.value)


def test_settings_of_the_http_side_reach_the_server() -> None:
    got = parse("--tokenflow-stall-limit", "0", "--tokenflow-origins", " https://A.example.com ,http://b:8080,")
    server_args = SimpleNamespace()
    args.attach(server_args, got)
    again = args.settings_of(pickle.loads(pickle.dumps(server_args)))
    assert again.stall_limit_s == 0.0 and again.allowed_origins == ("https://a.example.com", "http://b:8080")


@pytest.mark.parametrize(("name", "value"), [("stall_limit", "60"), ("stall_limit", True), ("origins", ["http://a"])])
def test_a_setting_of_another_type_is_refused_by_name(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(args.ENV_CONFIG, json.dumps({name: value}))
    with pytest.raises(ValueError, match=name.replace("_", "[-_]")):
        parse()
