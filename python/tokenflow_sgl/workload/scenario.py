"""Scenarios: what arrives, and the settings that make memory the limit, read from TOML.

Owns the file format but for its groups (groups.py). Draws nothing (arrivals.py does) and starts nothing. Invariant: a
loaded scenario is frozen and carries the hash of its text and of the files it names, so that a result can name exactly
what it was made from.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tokenflow_sgl.workload.files import beside_scenario, is_file, read_utf8
from tokenflow_sgl.workload.groups import Group, ReadRate, parse_group
from tokenflow_sgl.workload.tables import ScenarioError, Table, shown

__all__ = [
    "GpuSettings",
    "Group",
    "ReadRate",
    "Scenario",
    "ScenarioError",
    "ServerSettings",
    "list_scenarios",
    "live_scenarios",
    "live_settings",
    "load_scenario",
    "parse_scenario",
]

SCENARIO_DIR = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What every server of a comparison is started with. Sizes in tokens; host_ratio: host pool over device pool."""

    model: str
    page_tokens: int
    kv_pool_tokens: int
    chunked_prefill_tokens: int
    host_ratio: float
    write_policy: str
    overlap: bool


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """The GPU that is simulated: names of a hardware and a model that the simulator knows, and its engine's settings.

    mem_fraction: (weights + KV pool) over device memory, SGLang's mem-fraction-static; kv_pool_tokens: the pool itself;
    exactly one of the two is there. max_running: most streams in a batch. host_ratio: host pool over device pool.
    """

    hardware: str
    model: str
    mem_fraction: float | None
    kv_pool_tokens: int | None
    page_tokens: int
    chunked_prefill_tokens: int
    max_running: int
    host_ratio: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """name, what it is about, the groups whose first token is judged (none: all alike), what live servers and what the
    simulated GPU are set to (at least one is there), groups, SHA-256 of the text and of the files it names.
    """

    name: str
    about: str
    newcomers: tuple[str, ...]
    server: ServerSettings | None
    gpu: GpuSettings | None
    groups: tuple[Group, ...]
    sha256: str


def list_scenarios() -> tuple[str, ...]:
    """Names of the scenarios that come with the package, sorted."""
    return tuple(sorted(path.stem for path in SCENARIO_DIR.glob("*.toml")))


def live_scenarios() -> tuple[str, ...]:
    """Those of them that live servers can be measured with."""
    texts = {name: (SCENARIO_DIR / f"{name}.toml").read_text(encoding="utf-8") for name in list_scenarios()}
    return tuple(name for name, text in texts.items() if "server" in tomllib.loads(text))


def live_settings(scenario: Scenario) -> ServerSettings:
    """What to start live servers with. Raises ScenarioError for a scenario that they cannot be measured with."""
    if scenario.server is None:
        valid = f"a scenario with [server] for live servers: {', '.join(live_scenarios())}"
        raise ScenarioError(f"server: missing in scenario {scenario.name}, valid: {valid}")
    if not scenario.newcomers:
        raise ScenarioError("newcomers: [], valid: for live servers at least one group")
    for group in scenario.groups:
        # The client sends on time and paces its reading: a question after an answer would leave at the start.
        if group.session is not None and group.session.turns[1] > 1:
            raise ScenarioError(f"group {group.name}: session.turns: {group.session.turns}, valid: for live servers 1")
        if any(math.isinf(rate.tok_s) for rate in group.read_rates):
            raise ScenarioError(f"group {group.name}: read_rate: inf, valid: for live servers a finite rate")
    return scenario.server


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A scenario by its name or by the path of a TOML file. Raises ScenarioError."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = SCENARIO_DIR / f"{name_or_path}.toml"
    if not is_file(path):
        raise ScenarioError(
            f"scenario: {shown(str(name_or_path))}, valid: {', '.join(list_scenarios())} or a .toml file"
        )
    return parse_scenario(read_utf8(path, field="scenario"), beside=path.parent)


def parse_scenario(text: str, *, beside: Path | None = None) -> Scenario:
    """A scenario from TOML text. Raises ScenarioError naming field, value and what is valid.

    beside: the folder where its traces are looked up first, and from which paths of hardware and model files start;
    None: only where TOKENFLOW_TRACES says, and in the current one.
    """
    try:
        table = Table(tomllib.loads(text), "")
    except (ValueError, RecursionError) as error:  # of TOML, too many digits for Python, too deep
        raise ScenarioError(f"scenario: not TOML ({error}), valid: a TOML document") from error
    name, about = table.file_name("name"), table.text("about")
    newcomers = table.texts("newcomers")
    server = _server(table.table("server")) if table.has("server") else None
    gpu = _gpu(table.table("gpu"), beside) if table.has("gpu") else None
    if server is None and gpu is None:
        raise ScenarioError("server: missing, valid: a table [server] for live servers, [gpu] to simulate, or both")
    groups = tuple(parse_group(group, beside=beside) for group in table.tables("group"))
    table.done()
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ScenarioError(f"group.name: {names}, valid: each name once")
    if unknown := set(newcomers) - set(names):
        raise ScenarioError(f"newcomers: {sorted(unknown)}, valid: names of groups ({', '.join(names)})")
    return Scenario(name, about, newcomers, server, gpu, groups, _hash(text, groups, gpu))


def _hash(text: str, groups: tuple[Group, ...], gpu: GpuSettings | None) -> str:
    """Of all that the scenario says: a GPU of its own is part of it, one that comes with the package is not."""
    digest = hashlib.sha256(text.encode())
    for group in groups:
        if group.trace is not None:
            digest.update(group.trace.path.read_bytes())
    for name in () if gpu is None else (gpu.hardware, gpu.model):
        for path in (Path(name), Path(name) / "config.json"):
            if "/" in name and is_file(path):
                digest.update(read_utf8(path, field="gpu").encode())
    return digest.hexdigest()


def _server(table: Table) -> ServerSettings:
    settings = ServerSettings(
        model=table.text("model"),
        page_tokens=table.integer("page_tokens", at_least=1),
        kv_pool_tokens=table.integer("kv_pool_tokens", at_least=1),
        chunked_prefill_tokens=table.integer("chunked_prefill_tokens", at_least=1),
        host_ratio=table.number("host_ratio", above=0.0),
        write_policy=table.choice("write_policy", ("write_through",)),
        overlap=table.flag("overlap"),
    )
    _check_pages(table, settings.kv_pool_tokens, page_tokens=settings.page_tokens)
    table.done()
    return settings


def _gpu(table: Table, beside: Path | None) -> GpuSettings:
    sized_by = table.one_of("mem_fraction", "kv_pool_tokens")
    settings = GpuSettings(
        hardware=beside_scenario(table.text("hardware"), beside),
        model=beside_scenario(table.text("model"), beside),
        mem_fraction=table.share("mem_fraction") if sized_by == "mem_fraction" else None,
        kv_pool_tokens=table.integer("kv_pool_tokens", at_least=1) if sized_by == "kv_pool_tokens" else None,
        page_tokens=table.integer("page_tokens", at_least=1),
        chunked_prefill_tokens=table.integer("chunked_prefill_tokens", at_least=1),
        max_running=table.integer("max_running", at_least=1),
        host_ratio=table.number("host_ratio", above=0.0),
    )
    if settings.kv_pool_tokens is not None:
        _check_pages(table, settings.kv_pool_tokens, page_tokens=settings.page_tokens)
    if settings.chunked_prefill_tokens < settings.page_tokens:  # prompts are cut at pages: none would ever be computed
        valid = f"at least page_tokens ({settings.page_tokens})"
        raise table.refuse("chunked_prefill_tokens", settings.chunked_prefill_tokens, valid)
    table.done()
    return settings


def _check_pages(table: Table, kv_pool_tokens: int, *, page_tokens: int) -> None:
    if kv_pool_tokens % page_tokens:
        raise table.refuse("kv_pool_tokens", kv_pool_tokens, f"a multiple of page_tokens ({page_tokens})")
