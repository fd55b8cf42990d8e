"""Entry point of the group sglang.srt.plugins: runs in every SGLang process, and is inert unless asked for.

Owns installing our hooks and proving that they are in force. Invariant: a process that was asked to be TokenFlow's and
is not ends with SystemExit and a message that names the hook; it never serves as stock.

SGLang logs a plugin's exception, or a hook it cannot apply, and goes on without it. Only SystemExit gets through its
`except Exception`; and the hooks are applied after all plugins ran, so the proof runs there, at the end of apply_hooks.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import args, checks, hooks, messages, rids

ENV_ENABLE = "TOKENFLOW_ENABLE"  # inherited by spawned children: the one switch
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HTTP_RUN = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
ABORT_TASK = "sglang.srt.managers.tokenizer_manager.TokenizerManager.create_abort_task"

DECODE_STATUS = "sglang.srt.managers.detokenizer_manager.DecodeStatus"

# Process titles upstream sets before it loads plugins. These two need little of ours, and importing the scheduler
# there would cost them a gigabyte of address space and seconds of start.
_DP_CONTROLLER = "sglang::data_parallel_controller"
_DETOKENIZER = "sglang::detokenizer"


@dataclass(frozen=True, slots=True)
class Install:
    """One hook of ours: `kind` is the name of a HookType."""

    target: str
    hook: Any
    kind: str


_installed: list[Install] = []


def enabled() -> bool:
    return os.environ.get(ENV_ENABLE) == "1"


def register() -> None:
    """Called by SGLang in each of its processes, before it does anything else. Raises SystemExit if we cannot work."""
    from tokenflow_sgl.platform import cpu_host_pool

    cpu_host_pool.register()
    if not enabled() or _installed:
        return
    title = _title()
    if title == _DP_CONTROLLER:  # it reads and forwards every message, ours as well
        messages.register()
        return
    try:
        (_register_detokenizer if title == _DETOKENIZER else _register)()
    except Exception as error:
        # Anything else would be logged by upstream, and the server would start as stock.
        raise SystemExit(
            f"tokenflow: cannot be loaded into SGLang {hooks.installed_release()}: {type(error).__name__}: {error}. "
            f"{hooks.FIX}."
        ) from error


def _register() -> None:
    if problems := hooks.check():
        raise SystemExit("\n".join(problems))
    from .scheduler import TokenFlowScheduler

    messages.register()
    _install(
        Install(SCHEDULER, TokenFlowScheduler, "REPLACE"),
        Install("sglang.srt.server_args.ServerArgs.add_cli_args", args.after_add_cli_args, "AFTER"),
        Install("sglang.srt.server_args.ServerArgs.from_cli_args", args.around_from_cli_args, "AROUND"),
        Install("sglang.srt.server_args.ServerArgs.check_server_args", checks.after_check_server_args, "AFTER"),
    )
    _verify_after_apply()


def _register_detokenizer() -> None:
    if problems := hooks.check(uses=hooks.DETOKENIZER_USES):
        raise SystemExit("\n".join(problems))
    from .detokenizer import SentOnce

    _install(Install(DECODE_STATUS, SentOnce, "REPLACE"))
    _verify_after_apply()


def install_http() -> None:
    """Bridge, routes and delayed aborts, in the process that serves HTTP. Called when a command line was parsed: an
    Engine has none, and importing the HTTP server would change its event loop policy."""
    from . import routes

    if enabled() and not any(i.target == HTTP_RUN for i in _installed):
        _install(
            Install(HTTP_RUN, routes.install_before_run, "BEFORE"),
            Install(ABORT_TASK, rids.around_create_abort_task, "AROUND"),
        )
        _apply()


def _install(*installs: Install) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for install in installs:
        HookRegistry.register(install.target, install.hook, HookType[install.kind])
        _installed.append(install)


def _apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def _verify_after_apply() -> None:
    """Make HookRegistry.apply_hooks end with our proof: it logs what it could not apply and returns normally."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry.apply_hooks
    if getattr(original, "tokenflow", False):
        return

    def apply_hooks(cls: type) -> None:
        original()
        verify_in_force()

    apply_hooks.tokenflow = True  # type: ignore[attr-defined]
    HookRegistry.apply_hooks = classmethod(apply_hooks)  # type: ignore[method-assign]


def verify_in_force() -> None:
    """SystemExit unless this process was asked to be ours and every hook of ours is in its place."""
    if not enabled():
        raise SystemExit(
            f"tokenflow: {ENV_ENABLE} is not 1 in process {os.getpid()}; use python -m tokenflow_sgl.launch_server."
        )
    if not _installed:
        raise SystemExit(
            f"tokenflow: SGLang {hooks.installed_release()} did not load our plugin in process {os.getpid()}: hook "
            f"{SCHEDULER} is not ours. Look for an import error in the log above; check that the package is installed "
            f"here, and that SGLANG_PLUGINS ({os.environ.get('SGLANG_PLUGINS', '')!r}) does not leave out `tokenflow`."
        )
    for install in _installed:
        if not _in_place(install):
            raise SystemExit(
                f"tokenflow: SGLang {hooks.installed_release()}: hook {install.target} is not in force: upstream could "
                f"not apply it, or another plugin replaced it (see the log above). {hooks.FIX}."
            )


def in_force() -> list[str]:
    """The hooks of ours that are in their place in this process, for /tokenflow/config."""
    return [install.target for install in _installed if _in_place(install)]


def _in_place(install: Install) -> bool:
    try:
        target = pkgutil.resolve_name(install.target)
    except (ImportError, AttributeError):
        return False
    if install.kind == "REPLACE":
        return target is install.hook
    return any(hook is install.hook for hook in _hooks_around(target))


def _hooks_around(target: Any) -> Iterator[Any]:
    """The hook functions in upstream's wrappers around `target`: each closes over its hook and names what it wraps."""
    while target is not None:
        for cell in getattr(target, "__closure__", None) or ():
            yield cell.cell_contents
        target = getattr(target, "__wrapped__", None)


def _title() -> str:
    import setproctitle

    return str(setproctitle.getproctitle())


def run_scheduler_process(*positional: Any, **named: Any) -> Any:
    """What our launcher spawns as a scheduler: upstream's own function, behind the proof that its class is ours.

    A child in which our plugin is not even found runs no line of it; this function is ours and runs first.
    """
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()
    verify_in_force()
    run: Callable[..., Any] = scheduler.run_scheduler_process
    return run(*positional, **named)
