"""Launch-time table of what cannot work with parking, what deserves a warning, and the same for a loaded model.

Owns the rows; changes no argument. Invariant: a combination that could give wrong output or a hung server is refused
by name, with the flag, its value and what to do; it never degrades silently.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .args import TokenflowSettings, settings_of

logger = logging.getLogger(__name__)

REFUSE = "refuse"
WARN = "warn"


@dataclass(frozen=True, slots=True)
class Check:
    """One row. `bad` sees the value of `field` on the arguments, None when this release has no such field.

    breaks_class: our scheduler class itself cannot run so; refused under --tokenflow-policy fcfs too.
    unless: a field that, when on, makes the combination harmless.
    """

    name: str
    flag: str
    field: str
    bad: Callable[[Any], bool]
    action: str
    why: str
    advice: str
    breaks_class: bool = False
    unless: str | None = None

    def message(self, value: Any) -> str:
        verdict = "cannot be used" if self.action == REFUSE else "is unwise"
        return f"tokenflow: {self.flag} (value {value!r}) {verdict}: {self.why}. {self.advice}."


def _on(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


_DROP = "Drop the flag, or run stock SGLang (python -m sglang.launch_server)"
_DROP_OR_FCFS = "Drop the flag, or use --tokenflow-policy fcfs"
_NO_HOST_CACHE = "parked streams live in upstream's unified radix tree and its host cache, which this replaces"

_NO_RATES = "it never loads plugins, so read rates would be ignored"
_OWN_CLOCKS = "each attention group would decide on its own clock, and their batches would differ"
_TP_INSTEAD = "Use --tp-size without it, or --dp-size, or stock SGLang"

# fmt: off
CHECKS: tuple[Check, ...] = (
    # These have an event loop or a batch layout of their own, which never asks our scheduler class.
    Check("pd_disaggregation", "--disaggregation-mode", "disaggregation_mode", lambda v: v not in (None, "null"),
          REFUSE, "prefill and decode servers have event loops of their own", _DROP, breaks_class=True),
    Check("pipeline_parallel", "--pp-size", "pp_size", _above_one,
          REFUSE, "the pipeline loop keeps several running batches", _DROP, breaks_class=True),
    Check("pdmux", "--enable-pdmux", "enable_pdmux", _on,
          REFUSE, "it has an event loop of its own", _DROP, breaks_class=True),
    Check("dllm", "--dllm-algorithm", "dllm_algorithm", _on,
          REFUSE, "a diffusion model does not decode token by token", _DROP, breaks_class=True),
    Check("ray", "--use-ray", "use_ray", _on,
          REFUSE, "Ray starts schedulers without our check that they are ours", _DROP, breaks_class=True),
    Check("encoder_only", "--encoder-only", "encoder_only", _on,
          REFUSE, "an encoder server has no scheduler", _DROP, breaks_class=True),
    Check("embedding", "--is-embedding", "is_embedding", _on,
          REFUSE, "an embedding model does not decode", _DROP, breaks_class=True),
    Check("dp_attention", "--attn-dp-size", "attn_dp_size", _above_one,
          REFUSE, _OWN_CLOCKS, _TP_INSTEAD, breaks_class=True),
    Check("dp_attention_old_flag", "--enable-dp-attention", "enable_dp_attention", _on,
          REFUSE, _OWN_CLOCKS, _TP_INSTEAD, breaks_class=True),
    Check("recv_interval", "--scheduler-recv-interval", "scheduler_recv_interval", _above_one,
          REFUSE, "the ranks' common clock rides on the receipt of requests and would stand still",
          "Leave it at 1", breaks_class=True),
    # No Python HTTP process of ours.
    Check("tokenizer_workers", "--tokenizer-worker-num", "tokenizer_worker_num", _above_one,
          REFUSE, _NO_RATES, "Leave it at 1"),
    Check("smg_grpc", "--smg-grpc-mode", "smg_grpc_mode", _on, REFUSE, _NO_RATES, _DROP),
    Check("grpc_mode", "--grpc-mode", "grpc_mode", _on, REFUSE, _NO_RATES, _DROP),
    # Parked KV would be lost, late or wrong.
    Check("no_radix_cache", "--disable-radix-cache", "disable_radix_cache", _on,
          REFUSE, "without a radix tree a parked stream would have to be computed again", _DROP_OR_FCFS),
    Check("radix_backend", "--radix-cache-backend", "radix_cache_backend", _on, REFUSE, _NO_HOST_CACHE, _DROP_OR_FCFS),
    Check("lmcache", "--enable-lmcache", "enable_lmcache", _on, REFUSE, _NO_HOST_CACHE, _DROP_OR_FCFS),
    Check("flexkv", "--enable-flexkv", "enable_flexkv", _on, REFUSE, _NO_HOST_CACHE, _DROP_OR_FCFS),
    Check("external_linker", "--enable-unified-cache-external-linker", "enable_unified_cache_external_linker", _on,
          REFUSE, _NO_HOST_CACHE, _DROP_OR_FCFS),
    Check("write_policy", "--hicache-write-policy", "hicache_write_policy", lambda v: v not in (None, "write_through"),
          REFUSE, "KV must be on the host ahead of need; this policy copies it at eviction, or not at all",
          "Use write_through, the default"),
    Check("host_memory_mode", "--hicache-host-memory-mode", "hicache_host_memory_mode",
          lambda v: v not in (None, "cache"),
          REFUSE, "the host memory would be a staging buffer and forget parked KV", "Use cache, the default"),
    Check("hisparse", "--enable-hisparse", "enable_hisparse", _on,
          REFUSE, "it stages KV on its own and its rows cannot be given back", _DROP_OR_FCFS),
    Check("speculative", "--speculative-algorithm", "speculative_algorithm", _on,
          REFUSE, "drafted tokens own KV beyond the committed length, which parking would lose", _DROP_OR_FCFS),
    Check("strip_thinking_cache", "--strip-thinking-cache", "strip_thinking_cache", _on,
          REFUSE, "the KV of the whole answer is thrown away when a stream is parked", _DROP_OR_FCFS),
    Check("language_only", "--language-only", "language_only", _on,
          REFUSE, "requests wait for an encoder server outside the queues that we see", _DROP_OR_FCFS),
    Check("priority_preemption", "--enable-priority-scheduling", "enable_priority_scheduling", _on,
          WARN, "upstream's own preemption forgets the KV of its victims",
          "Add --disable-priority-preemption; priorities still count", unless="disable_priority_preemption"),
    Check("schedule_policy", "--schedule-policy", "schedule_policy", lambda v: v not in (None, "fcfs"),
          WARN, "our policy orders the requests, and this order has no effect", "Drop the flag"),
)
# fmt: on


def problems(config: Any, settings: TokenflowSettings) -> tuple[list[str], list[str]]:
    """(refusals, warnings) for `config`, anything with the fields of ServerArgs."""
    refusals: list[str] = []
    warnings: list[str] = []
    for check in CHECKS:
        value = getattr(config, check.field, None)
        harmless = check.unless is not None and getattr(config, check.unless, False)
        asked = check.breaks_class or settings.policy != "fcfs"
        if asked and check.bad(value) and not harmless:
            (refusals if check.action == REFUSE else warnings).append(check.message(value))
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):  # as upstream reads it
        refusals.append(
            "tokenflow: SGLANG_RUST_SERVER=1 cannot be used: read rates need the Python HTTP server. Unset it."
        )
    return refusals, warnings


def refuse_or_exit(config: Any, settings: TokenflowSettings) -> None:
    """SystemExit with every refusal, one per line: shown without a traceback, and not swallowed by plugin loaders."""
    refusals, warnings = problems(config, settings)
    if refusals:
        raise SystemExit("\n".join(refusals))
    for warning in warnings:
        logger.warning(warning)


def after_check_server_args(result: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER hook of ServerArgs.check_server_args(self): the same table on what upstream resolved.

    A model or a deprecated flag can turn a feature on that the user never named; and an Engine has no command line.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    try:
        settings = settings_of(server_args)
    except ValueError as error:
        raise SystemExit(f"tokenflow: {error}") from error
    config = resolving_view(server_args)
    if settings.policy != "fcfs" and not getattr(config, "enable_hierarchical_cache", False):
        raise SystemExit(
            "tokenflow: --enable-hierarchical-cache (value False) is needed: parked streams live in the host "
            "cache. Add it, start with python -m tokenflow_sgl.launch_server, or use --tokenflow-policy fcfs."
        )
    refuse_or_exit(config, settings)


def refuse_runtime(scheduler: Any, settings: TokenflowSettings) -> None:
    """What only the loaded model reveals; call once the scheduler's tree cache exists. Raises SystemExit."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    model = getattr(scheduler.model_config, "model_path", "the model")
    found: list[str] = []
    if not scheduler.is_generation:
        found.append("it does not generate")
    if settings.policy != "fcfs":
        if scheduler.is_hybrid_swa:
            found.append("it has sliding-window layers, whose KV leaves the tree while the stream still needs it")
        if scheduler.is_hybrid_ssm:
            found.append("it has recurrent (Mamba) state, which cannot be kept for an unfinished request")
        if getattr(scheduler.model_config, "is_encoder_decoder", False):
            found.append("it is an encoder-decoder, whose encoder state is not in the tree")
        tree = scheduler.tree_cache
        if not isinstance(tree, UnifiedRadixCache) or tree.cache_controller is None:
            found.append(
                f"its KV cache is {type(tree).__name__} without a host tier; UnifiedRadixCache with one is needed"
            )
    if found:
        raise SystemExit(
            f"tokenflow: {model} cannot be served with --tokenflow-policy {settings.policy}: {'; '.join(found)}. "
            "Use --tokenflow-policy fcfs where it only concerns parking, or stock SGLang."
        )


@contextmanager
def host_memory_or_exit(server_args: Any) -> Iterator[None]:
    """While the scheduler is made: a host pool that does not fit ends it with the numbers and the flag to change, as a
    refusal at start, and is not killed later. Upstream counts what the machine has free and what a cgroup allows."""
    try:
        yield
    except ValueError as error:
        if "host memory" not in str(error):
            raise
        size = getattr(server_args, "hicache_size", 0)
        flag = f"--hicache-size (value {size!r})"
        if not size:
            flag = f"--hicache-ratio (value {getattr(server_args, 'hicache_ratio', None)!r})"
        raise SystemExit(f"tokenflow: {flag} asks for too much: {error} Use a smaller value.") from error
