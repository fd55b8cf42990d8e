"""Rival policies on TokenFlow's own seam, as strong as their papers and sources let them be.

Owns their names. Invariant: all are driven, checked and measured as TokenFlow is; each says in `copies` what its
executor must be set to (PolicyConfig.copies; `tokenflow-guide` takes it from its config: ahead).
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import PolicyConfig
from ..types import Policy
from .andes import Andes
from .guide import guide_policy
from .hrrn import Hrrn
from .paper import PaperTokenFlow
from .priority import ClientPriority
from .vllm import Vllm
from .vllm_offload import VllmOffload
from .vlt import VirtualLag

RIVALS: dict[str, Callable[[PolicyConfig], Policy]] = {
    "hrrn": lambda config: Hrrn(),
    "priority": lambda config: ClientPriority(),
    "vllm": lambda config: Vllm(),
    "vllm-offload": lambda config: VllmOffload(),
    "andes": Andes,
    "vlt": VirtualLag,
    "tokenflow-paper": PaperTokenFlow,
    "tokenflow-guide": guide_policy,
}
