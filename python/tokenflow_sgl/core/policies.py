"""Builds a policy from its name and settings: for the scheduler, and for the replay of its journal.

Owns the names. Invariant: policy_from_header(header_of(...)) decides as the policy that wrote the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .baselines import Fcfs, Scripted
from .config import PolicyConfig
from .policy import TokenFlowPolicy
from .rivals import RIVALS
from .types import Policy

POLICIES = ("tokenflow", "fcfs", "scripted", *RIVALS)


def make_policy(name: str, config: PolicyConfig, script: Mapping[str, Any] | None = None) -> Policy:
    """Raises ValueError for an unknown name, and for `scripted` without a script."""
    if name == "tokenflow":
        return TokenFlowPolicy(config)
    if name == "fcfs":
        return Fcfs()
    if name in RIVALS:
        return RIVALS[name](config)
    if name == "scripted" and script is not None:
        return Scripted.from_mapping(script)
    raise ValueError(f"policy={name!r}: valid are {', '.join(POLICIES)}; scripted needs a script")


def header_of(name: str, config: PolicyConfig, script: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a journal must carry so that its policy can be built again."""
    return {"policy": name, "config": config.to_mapping(), "script": None if script is None else dict(script)}


def policy_from_header(header: Mapping[str, Any]) -> Policy:
    return make_policy(header["policy"], PolicyConfig.from_mapping(header["config"]), header["script"])
