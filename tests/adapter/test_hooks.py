"""The hook table fits the pinned release, and a release it does not fit stops the server by name (field report B38)."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenflow_sgl.adapter import hooks, plugin

ADAPTER = Path(hooks.__file__).parent


def test_every_row_resolves_on_the_pinned_release() -> None:
    assert hooks.installed_release() == hooks.PINNED_RELEASE
    assert hooks.check() == []


def test_every_override_of_our_subclasses_has_a_row() -> None:
    from tokenflow_sgl.adapter import admission, scheduler, streamer

    rows = {use.path for use in hooks.USES if use.kind == hooks.OVERRIDE}
    ours = (scheduler.TokenFlowScheduler, admission.PlannedAdder, admission.PlannedOrder, streamer.ParkAwareStreamer)
    for cls in ours:
        base = cls.__mro__[1]
        for name in vars(cls):
            if callable(vars(cls)[name]) and not name.startswith("__") and hasattr(base, name):
                assert f"{base.__module__}.{base.__qualname__}.{name}" in rows, f"{cls.__name__}.{name} has no row"


def test_subclasses_call_super_without_arguments() -> None:
    # REPLACE rebinds the class's name in our modules too: super(TokenFlowScheduler, self) would find itself.
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
                assert not node.args, f"{path.name}:{node.lineno}"


@pytest.fixture
def doctored() -> Iterator[types.ModuleType]:
    """A scratch upstream with one class."""
    module = types.ModuleType("scratch_upstream")
    exec("class Worker:\n    def run(self, batch, rest=()): ...", vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def problems(*uses: hooks.Use) -> list[str]:
    return hooks.check(uses=uses)


def test_renamed_hook_is_named_with_release_and_fix(doctored: types.ModuleType) -> None:
    fits = hooks.Use(hooks.OVERRIDE, "scratch_upstream.Worker.run", ("batch", "rest"))
    assert problems(fits) == []
    doctored.Worker.walk = doctored.Worker.run
    del doctored.Worker.run
    (problem,) = problems(fits)
    for part in (hooks.installed_release(), "OVERRIDE scratch_upstream.Worker.run", "does not exist", hooks.FIX):
        assert part in problem


def test_lost_parameter_is_named(doctored: types.ModuleType) -> None:
    (problem,) = problems(hooks.Use(hooks.CALL, "scratch_upstream.Worker.run", ("batch", "limit")))
    assert "no longer takes limit" in problem


def test_missing_module_is_named() -> None:
    (problem,) = problems(hooks.Use(hooks.CALL, "scratch_upstream.gone.f"))
    assert "scratch_upstream.gone.f" in problem


def test_field_set_on_instances_only_is_found_in_the_source() -> None:
    assert problems(hooks.Use(hooks.FIELD, "sglang.srt.managers.scheduler.Scheduler.waiting_queue")) == []
    assert problems(hooks.Use(hooks.FIELD, "sglang.srt.managers.scheduler.Scheduler.waiting_line"))
    assert problems(hooks.Use(hooks.CALL, "sglang.srt.managers.scheduler.Scheduler.waiting_queue"))


@pytest.mark.parametrize("release", ["0.5.20", "0.5.24", "0.6.0", "none"])
def test_untested_release_is_refused_unless_the_user_insists(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENFLOW_ALLOW_UNTESTED", raising=False)
    (problem,) = hooks.check(release, uses=())
    assert release in problem and "--tokenflow-allow-untested" in problem and "supported: 0.5.23" in problem
    monkeypatch.setenv("TOKENFLOW_ALLOW_UNTESTED", "1")
    assert hooks.check(release, uses=()) == []


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TokenFlow asked for in this process, with SGLang's hook registry put back afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setenv(plugin.ENV_ENABLE, "1")
    monkeypatch.setattr(plugin, "_installed", [])
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "apply_hooks", HookRegistry.apply_hooks)
    server_args = importlib.import_module("sglang.srt.server_args").ServerArgs
    methods = {n: vars(server_args)[n] for n in ("add_cli_args", "from_cli_args", "check_server_args")}
    importlib.import_module("tokenflow_sgl.adapter.scheduler")  # now, so that its own binding is among the kept
    stock = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    # A REPLACE reaches every module that holds the class; whoever runs after us in this process wants stock back.
    holders = [(m, n) for m in list(sys.modules.values()) for n, v in list(vars(m).items()) if v is stock]
    yield
    for name, method in methods.items():
        setattr(server_args, name, method)
    for module, name in holders:
        setattr(module, name, stock)


def test_register_stops_the_process_when_a_hook_is_missing(switched_on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "get_new_batch_prefill")
    with pytest.raises(
        SystemExit, match=r"OVERRIDE sglang\.srt\.managers\.scheduler\.Scheduler\.get_new_batch_prefill"
    ):
        plugin.register()


def test_register_stops_the_process_when_our_own_scheduler_cannot_be_imported(
    switched_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenflow_sgl.adapter.scheduler", None)
    with pytest.raises(SystemExit, match="cannot be loaded into SGLang"):
        plugin.register()


def test_hook_that_upstream_could_not_apply_stops_the_process(
    switched_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.register()
    whole = HookRegistry._apply_target.__func__  # type: ignore[attr-defined]

    def failing(cls: type, target: str, registered: list[object]) -> None:
        if target.endswith("from_cli_args"):
            raise AttributeError("renamed upstream")
        whole(cls, target, registered)

    monkeypatch.setattr(HookRegistry, "_apply_target", classmethod(failing))
    with pytest.raises(SystemExit, match=r"hook .*from_cli_args is not in force"):
        HookRegistry.apply_hooks()


def test_other_plugin_that_takes_the_scheduler_after_us_stops_the_process(switched_on: None) -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin.register()
    other = type("OtherScheduler", (Scheduler,), {})
    HookRegistry.register(plugin.SCHEDULER, other, HookType.REPLACE)
    with pytest.raises(SystemExit, match="another plugin replaced it"):
        HookRegistry.apply_hooks()


def test_all_hooks_in_place_are_reported_and_really_run(switched_on: None) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.register()
    HookRegistry.apply_hooks()
    plugin.verify_in_force()
    assert plugin.SCHEDULER in plugin.in_force() and len(plugin.in_force()) == 4
    scheduler = importlib.import_module("sglang.srt.managers.scheduler")
    assert scheduler.Scheduler.__module__ == "tokenflow_sgl.adapter.scheduler"

    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert "--tokenflow-policy" in parser.format_help()


def test_process_that_was_asked_for_and_has_no_plugin_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_installed", [])
    monkeypatch.setenv(plugin.ENV_ENABLE, "1")
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(SystemExit, match=r"did not load our plugin.*'other'"):
        plugin.verify_in_force()
