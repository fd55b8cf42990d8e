"""Server processes to measure: started, waited for, stopped.

Owns their command lines and life. Sends no load and keeps no results. Invariant: a server's whole process group ends
with its context, and nothing else is ever signalled.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenflow_sgl.workload.scenario import ServerSettings

KINDS: Mapping[str, str] = {
    "stock": "SGLang as it is, with the hierarchical cache",
    "stock-eager": "stock with --schedule-conservativeness 0.2, which admits newcomers eagerly",
    "stock-nocache": "stock without the hierarchical cache",
    "tokenflow": "our launcher",
    "tokenflow-no-offload": "without host copies: what leaves the device is computed again",
    "tokenflow-no-publishing": "without copies ahead: KV goes to the host when its stream is parked",
    "tokenflow-no-overlap": "without loads ahead: KV comes back in the step whose forward waits for it",
    "tokenflow-no-forecast": "without the burst forecast: publishes by free memory alone",
}
_ABLATIONS: Mapping[str, tuple[str, ...]] = {
    "tokenflow-no-offload": ("--tokenflow-copies", "none"),
    "tokenflow-no-publishing": ("--tokenflow-copies", "at_park"),
    "tokenflow-no-overlap": ("--tokenflow-loads", "at_admission"),
    "tokenflow-no-forecast": ("--tokenflow-forecast", "0"),
}
START_DEADLINE_S = 600.0
STOP_GRACE_S = 10.0
LOG_TAIL_LINES = 30


class ServerFailed(RuntimeError):
    """A server did not come up; the message holds the end of its log."""


def server_command(kind: str, *, model: Path, settings: ServerSettings, port: int) -> list[str]:
    """The command line of a server of `kind` (a key of KINDS). All kinds share every flag but those that name them."""
    if kind not in KINDS:
        raise ValueError(f"server: {kind!r}, valid: {', '.join(KINDS)}")
    module = "tokenflow_sgl.launch_server" if kind.startswith("tokenflow") else "sglang.launch_server"
    flags = [
        *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        *("--mem-fraction-static", "0.1", "--skip-server-warmup"),
        *("--page-size", str(settings.page_tokens), "--max-total-tokens", str(settings.kv_pool_tokens)),
        *("--chunked-prefill-size", str(settings.chunked_prefill_tokens)),
        *("--enable-custom-logit-processor", "--enable-metrics"),
    ]
    if kind != "stock-nocache":
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", f"{settings.host_ratio:g}"]
        flags += ["--hicache-write-policy", settings.write_policy]
    if not settings.overlap:
        flags.append("--disable-overlap-schedule")
    if kind == "stock-eager":
        flags += ["--schedule-conservativeness", "0.2"]
    flags += _ABLATIONS.get(kind, ())
    return [sys.executable, "-m", module, *flags]


class ServerProcess:
    """One running server. Its processes are one group, led by the one we started."""

    def __init__(self, name: str, command: Sequence[str], *, url: str, log: Path) -> None:
        self.name = name
        self.url = url
        self.log = log
        self._stopped = False
        log.parent.mkdir(parents=True, exist_ok=True)
        # Without one thread per operation the engine's threads fight over the cores and it runs 4 to 18 times slower.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                list(command), stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def wait_ready(self, *, deadline_s: float = START_DEADLINE_S, tick: Callable[[float], None] | None = None) -> None:
        """Return once a token can be made. Raises ServerFailed if the process ends or deadline_s seconds pass.

        tick: called about once a second with the seconds waited so far, for progress lines.
        """
        began_s = time.monotonic()
        while not self._answers("/health_generate"):
            waited_s = time.monotonic() - began_s
            if self._process.poll() is not None:
                status = self._process.returncode
                raise ServerFailed(f"server {self.name} ended with status {status}\n{self.log_tail()}")
            if waited_s > deadline_s:
                raise ServerFailed(f"server {self.name} not ready after {deadline_s:.0f} s\n{self.log_tail()}")
            if tick:
                tick(waited_s)
            time.sleep(1.0)

    def stop(self) -> None:
        """End the process group: asked first, then killed. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        # The leader alone: with all asked at once it takes its children's end for a crash and waits to diagnose it.
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        # Children may outlive their leader and keep the port and the memory.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def log_tail(self) -> str:
        """The last lines of its log, headed by the log's path."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"end of {self.log}:", *lines])

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def start_server(
    kind: str, *, model: Path, settings: ServerSettings, log: Path, more: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """A server of `kind` on a free port of 127.0.0.1, not waited for; stopped when the context ends. `more`: flags."""
    port = free_port()
    command = [*server_command(kind, model=model, settings=settings, port=port), *more]
    server = ServerProcess(kind, command, url=f"http://127.0.0.1:{port}", log=log)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
