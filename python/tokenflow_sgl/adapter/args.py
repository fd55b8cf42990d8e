"""The `--tokenflow-*` flags: made from PolicyConfig, parsed once, carried to the scheduler on ServerArgs.

Owns names, parsing and transport of settings; validates only what PolicyConfig does not. Invariant: whoever runs a
scheduler reads settings_of(server_args), and it has been valid since the launch.

Flag names drop the unit suffix of the field (`default_read_rate_tok_s` is `--tokenflow-default-read-rate`). Programs
that build an Engine have no command line: they put the same names and values as JSON in TOKENFLOW_CONFIG, keys as
in the dataclasses here, for example {"policy": "fcfs", "default_read_rate_tok_s": 8}.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..core.baselines import Scripted
from ..core.config import PolicyConfig

logger = logging.getLogger(__name__)
ENV_CONFIG = "TOKENFLOW_CONFIG"
ENV_ALLOW_UNTESTED = "TOKENFLOW_ALLOW_UNTESTED"
ALLOW_UNTESTED_FLAG = "--tokenflow-allow-untested"
POLICIES = ("tokenflow", "fcfs", "scripted")
_ATTRIBUTE = "_tokenflow"  # underscore: ServerArgs lets bookkeeping attributes pass its seal, and pickles them
_UNIT_SUFFIXES = ("_tok_s", "_tokens", "_s")


@dataclass(frozen=True, slots=True)
class TokenflowSettings:
    """All settings of this package. Raises ValueError naming the setting, its value and what is valid."""

    policy: str = "tokenflow"
    config: PolicyConfig = field(default_factory=PolicyConfig)
    journal_path: str | None = None
    script_path: str | None = None
    check_plans: bool = False
    sse_comments_s: float = 2.0
    stall_limit_s: float = 60.0
    origins: str = ""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"--tokenflow-policy={self.policy!r}: valid are {', '.join(POLICIES)}")
        if (self.policy == "scripted") != (self.script_path is not None):
            raise ValueError(
                f"--tokenflow-script={self.script_path!r} with --tokenflow-policy={self.policy!r}: "
                "a script and the policy scripted need each other"
            )
        if self.script_path is not None:
            Scripted.from_mapping(self.script())
        for name, (most, _) in _SECONDS.items():
            value = getattr(self, _OWN_KEYS[name])
            if type(value) not in (int, float) or not 0.0 <= value <= most:
                raise ValueError(f"{flag_of(name)}={value!r}: valid is 0 to {most} s, 0 = never")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null|\*", origin):
                raise ValueError(
                    f"--tokenflow-origins={origin!r}: valid are origins such as https://chat.example.com with commas "
                    "between, or * for any"
                )
        if self.journal_path is not None and not Path(self.journal_path).absolute().parent.is_dir():
            raise ValueError(f"--tokenflow-journal={self.journal_path!r}: its directory does not exist")

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Of web pages that may open a socket though they come from another host."""
        return tuple(o.strip().lower() for o in self.origins.split(",") if o.strip())

    def script(self) -> dict[str, Any]:
        """The JSON object in the script file."""
        assert self.script_path is not None
        try:
            content = json.loads(Path(self.script_path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--tokenflow-script={self.script_path!r}: not a readable JSON file ({error})") from error
        if not isinstance(content, dict):
            raise ValueError(f"--tokenflow-script={self.script_path!r}: valid is a JSON object")
        return content

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TokenflowSettings:
        """From one flat mapping: policy, journal, script, check_plans, and any PolicyConfig field."""
        rest = dict(values)
        own = {key: rest.pop(name) for name, key in _OWN_KEYS.items() if name in rest}
        for name in ("journal", "script"):
            if not isinstance(own.get(_OWN_KEYS[name]), str | None):
                raise ValueError(f"{name}={own[_OWN_KEYS[name]]!r}: valid is the path of a file")
        if not isinstance(own.get("check_plans", False), bool):
            raise ValueError(f"check_plans={own['check_plans']!r}: valid are true and false")
        if not isinstance(own.get("origins", ""), str):
            raise ValueError(f"origins={own['origins']!r}: valid is a text with commas between origins")
        return cls(config=PolicyConfig.from_mapping(rest), **own)

    def to_mapping(self) -> dict[str, Any]:
        own = {name: getattr(self, key) for name, key in _OWN_KEYS.items()}
        return {**own, **self.config.to_mapping()}


_OWN_KEYS = {
    "policy": "policy",
    "journal": "journal_path",
    "script": "script_path",
    "check_plans": "check_plans",
    "sse_comments": "sse_comments_s",
    "stall_limit": "stall_limit_s",
    "origins": "origins",
}
# Of these, spans of time: the longest, and what for.
_SECONDS = {
    "sse_comments": (
        3600,
        "seconds of silence in a streamed reply after which a comment line is sent, so that nothing in between "
        "hangs up on a parked stream",
    ),
    "stall_limit": (
        86400,
        "seconds after which a stream is cut off whose client reads not one byte of what is sent to it",
    ),
}


def flag_of(name: str) -> str:
    """The flag of a setting."""
    for suffix in _UNIT_SUFFIXES:
        if name.endswith(suffix):
            name = name.removesuffix(suffix)
            break
    return "--tokenflow-" + name.replace("_", "-")


def _dest(name: str) -> str:
    return f"tokenflow_{name}"


def _checked(f: Field[Any], kind: type) -> Callable[[str], Any]:
    """An argparse type that lets PolicyConfig judge: the error names the flag, its value and the valid range."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'an integer' if kind is int else 'a number'}") from None
        try:
            PolicyConfig.from_mapping({f.name: value})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return parse


def _help(f: Field[Any]) -> str:
    unit = f.metadata.get("unit") or ""
    bounds = ""
    if f.metadata.get("min") is not None and f.metadata.get("max") is not None:
        bounds = f"{f.metadata['min']:g} to {f.metadata['max']:g}, "
    text = f"{f.metadata['help']} [{unit + ', ' if unit else ''}{bounds}default {f.default}]"
    return text.replace("%", "%%")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our argument group. Every flag's default is None: absent, so that the dataclasses own all defaults."""
    group = parser.add_argument_group(
        "TokenFlow", "Buffer-aware preemptive scheduling; in force under tokenflow_sgl.launch_server."
    )
    group.add_argument(
        "--tokenflow-policy",
        choices=POLICIES,
        dest=_dest("policy"),
        help="who decides: tokenflow parks and returns streams, fcfs behaves as stock SGLang, "
        "scripted parks what --tokenflow-script says, for tests [default tokenflow]",
    )
    group.add_argument(
        "--tokenflow-journal",
        metavar="PATH",
        dest=_dest("journal"),
        help="record events, views and plans as JSON lines, for `tokenflow replay` [default off]",
    )
    group.add_argument(
        "--tokenflow-script",
        metavar="PATH",
        dest=_dest("script"),
        help="JSON file of the scripted policy [default none]",
    )
    group.add_argument(
        "--tokenflow-check-plans",
        action="store_const",
        const=True,
        dest=_dest("check_plans"),
        help="check every plan for legality and stop at the first illegal one; slow [default off]",
    )
    for name, (most, text) in _SECONDS.items():
        default = getattr(TokenflowSettings(), _OWN_KEYS[name])
        text = f"{text}; 0 = never [s, 0 to {most}, default {default:g}]"
        group.add_argument(flag_of(name), type=float, metavar="X", dest=_dest(name), help=text)
    group.add_argument(
        "--tokenflow-origins",
        metavar="ORIGIN,..",
        dest=_dest("origins"),
        help="web pages of these origins may open /tokenflow/stream, beside those from the server's own host "
        "[default none]",
    )
    group.add_argument(
        ALLOW_UNTESTED_FLAG,
        action="store_true",
        help="start on an SGLang release this package was not tested with [default off]",
    )
    for f in fields(PolicyConfig):
        if f.metadata.get("choices"):
            kind: dict[str, Any] = {"choices": f.metadata["choices"]}
        elif isinstance(f.default, bool):
            kind = {"action": argparse.BooleanOptionalAction, "default": None}
        else:
            kind = {"type": _checked(f, type(f.default)), "metavar": "N" if isinstance(f.default, int) else "X"}
        group.add_argument(flag_of(f.name), dest=_dest(f.name), help=_help(f), **kind)


def _environment() -> dict[str, Any]:
    """The settings in TOKENFLOW_CONFIG; empty without it. Raises ValueError."""
    text = os.environ.get(ENV_CONFIG) or "{}"
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{ENV_CONFIG}={text!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{ENV_CONFIG}={text!r}: valid is a JSON object of setting names and values")
    try:
        PolicyConfig.from_mapping({name: value for name, value in values.items() if name not in _OWN_KEYS})
    except ValueError as error:
        raise ValueError(f"{ENV_CONFIG}: {error}") from error
    return values


def settings_from_namespace(namespace: argparse.Namespace) -> TokenflowSettings:
    """Settings of a parsed command line, over those of TOKENFLOW_CONFIG. Raises ValueError."""
    names = [*_OWN_KEYS, *(f.name for f in fields(PolicyConfig))]
    given = {name: getattr(namespace, _dest(name), None) for name in names}
    return TokenflowSettings.from_mapping({**_environment(), **{k: v for k, v in given.items() if v is not None}})


def attach(server_args: Any, settings: TokenflowSettings) -> None:
    """Let the settings ride on ServerArgs into the scheduler processes. A plain dict survives the pickling of spawn."""
    setattr(server_args, _ATTRIBUTE, settings.to_mapping())


def settings_of(server_args: Any) -> TokenflowSettings:
    """What a server was launched with: its flags, else TOKENFLOW_CONFIG, else the defaults. Raises ValueError."""
    values = getattr(server_args, _ATTRIBUTE, None)
    return TokenflowSettings.from_mapping(_environment() if values is None else values)


def after_add_cli_args(result: Any, parser: argparse.ArgumentParser, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of ServerArgs.add_cli_args(parser)."""
    add_flags(parser)


def turn_on_host_cache(namespace: argparse.Namespace, settings: TokenflowSettings) -> None:
    """Streams are parked into upstream's hierarchical cache: without it a park would forget the KV.

    Its write policy, write_through, is upstream's default; a user's other choice is for checks.py to refuse. fcfs
    parks nobody, so the cache stays as the user set it, as in stock.
    """
    if settings.policy != "fcfs" and not getattr(namespace, "enable_hierarchical_cache", False):
        logger.info(
            "TokenFlow: --enable-hierarchical-cache turned on; --hicache-ratio or --hicache-size sizes host memory"
        )
        namespace.enable_hierarchical_cache = True


def _keep_old_journals(settings: TokenflowSettings) -> None:
    """A restart, or a second server, must not write over the record of what happened."""
    if settings.journal_path is None:
        return
    path = Path(settings.journal_path)
    old = [
        p for p in (path, *path.parent.glob(f"{path.name}.rank*"), *path.parent.glob(f"{path.name}.dp*")) if p.is_file()
    ]
    if old:
        raise SystemExit(
            f"tokenflow: --tokenflow-journal={settings.journal_path!r}: {old[0]} exists, and a journal is never "
            "written over. Move it away, or name another file."
        )


def around_from_cli_args(
    original: Callable[..., Any], cls: type, namespace: argparse.Namespace, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook of ServerArgs.from_cli_args(args): our settings onto the record, wrong combinations out by name.

    The checks run here first, on what the user typed: upstream's own resolution would else refuse a combination with
    the hierarchical cache and blame a flag that the user never gave.
    """
    from . import checks, plugin

    try:
        settings = settings_from_namespace(namespace)
    except ValueError as error:
        raise SystemExit(f"tokenflow: {error}") from error
    _keep_old_journals(settings)
    checks.refuse_or_exit(namespace, settings)
    turn_on_host_cache(namespace, settings)
    server_args = original(cls, namespace, *args, **kwargs)
    attach(server_args, settings)
    plugin.install_http()
    return server_args
