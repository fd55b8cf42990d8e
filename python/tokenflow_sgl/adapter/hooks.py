"""Table of every attribute of SGLang that this package uses, and its check against the installed release.

Owns the list of what must exist; installs nothing. Invariant: a name of SGLang that our code relies on has a row here,
so a release that renamed it stops the server at start, by name, and does not serve without us or fail later.

Kinds: OVERRIDE a method our subclass overrides; REPLACE, HOOK targets we put ourselves into; CALL what we call; FIELD
an attribute we read or write. A FIELD on a class that sets it in __init__ only has no class attribute to find: it is
looked for as `self.NAME` in the source of the class and its bases, which tells that it exists, not when.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .args import ALLOW_UNTESTED_FLAG, ENV_ALLOW_UNTESTED

TESTED_RELEASES = ("0.5.23",)
PINNED_RELEASE = "0.5.23"
FIX = (
    f"Install a supported release (pip install sglang=={PINNED_RELEASE}; supported: {', '.join(TESTED_RELEASES)}); "
    "`tokenflow doctor` lists what works here"
)

OVERRIDE, CALL, FIELD, REPLACE, HOOK = "OVERRIDE", "CALL", "FIELD", "REPLACE", "HOOK"


@dataclass(frozen=True, slots=True)
class Use:
    """One row. `path` is dotted, module first; `params` are the parameter names we pass or expect."""

    kind: str
    path: str
    params: tuple[str, ...] = ()


def _rows(kind: str, prefix: str, *names: str) -> tuple[Use, ...]:
    """Rows from "name" or "name(param, param)"."""
    out = []
    for text in names:
        name, _, inside = text.partition("(")
        params = tuple(p.strip() for p in inside.rstrip(")").split(",") if p.strip())
        out.append(Use(kind, f"{prefix}.{name}", params))
    return tuple(out)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_IO = "sglang.srt.managers.io_struct"
_HTTP = "sglang.srt.entrypoints.http_server"
_BATCH = "sglang.srt.managers.schedule_batch"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_PARTS = "sglang.srt.managers.scheduler_components"
_STREAMER = f"{_PARTS}.output_streamer.SchedulerOutputStreamer"
_PENALTY = "sglang.srt.sampling.penaltylib"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager"

DETOKENIZER_USES: tuple[Use, ...] = (
    *_rows(REPLACE, f"{_DETOKENIZER}.DecodeStatus", "append_decoded_text(text)"),
    *_rows(FIELD, f"{_DETOKENIZER}.DecodeStatus", "sent_offset"),
)
USES: tuple[Use, ...] = (
    *DETOKENIZER_USES,
    # plugin.py, launch_server.py
    *_rows(REPLACE, "sglang.srt.managers.scheduler", "Scheduler(server_args, port_args)"),
    *_rows(CALL, "sglang.srt.managers.scheduler", "run_scheduler_process(server_args, port_args, pipe_writer)"),
    *_rows(CALL, "sglang.srt.plugins", "load_plugins"),
    *_rows(CALL, "sglang.srt.plugins.hook_registry.HookRegistry", "register(target, hook, hook_type)", "apply_hooks"),
    *_rows(CALL, _HTTP, "launch_server(server_args, run_scheduler_process_func)"),
    *_rows(CALL, "sglang.srt.server_args", "prepare_server_args(argv)"),
    *_rows(CALL, "sglang.srt.utils", "kill_process_tree(parent_pid, include_parent)"),
    # args.py, checks.py
    *_rows(
        HOOK, "sglang.srt.server_args.ServerArgs", "add_cli_args(parser)", "from_cli_args(args)", "check_server_args"
    ),
    *_rows(CALL, "sglang.srt.arg_groups.overrides", "resolving_view"),
    *_rows(FIELD, _TREE, "cache_controller"),
    *_rows(FIELD, _SCHEDULER, "is_generation", "is_hybrid_swa", "is_hybrid_ssm", "model_config", "tree_cache"),
    # scheduler.py
    *_rows(
        OVERRIDE,
        _SCHEDULER,
        "init_running_status",
        "init_schedule_policy",
        "init_request_dispatcher",
        "init_metrics_reporter",
        "get_prefill_adder_class",
        "get_output_streamer_class",
        "_poll_timeout_aborts",
        "_create_generation_req(recv_req)",
        "_add_request_to_queue(req, is_retracted)",
        "_abort_on_queued_limit(recv_req)",
        "send_abort_output(abort_req, req)",
        "abort_request(recv_req)",
        "get_next_batch_to_run(running_batch, last_batch)",
        "_should_defer_prefill(running_batch)",
        "get_new_batch_prefill(running_batch)",
        "process_batch_result(batch, result)",
        "on_idle",
        "get_internal_state(recv_req)",
        "is_fully_idle",
        "flush_cache",
        "_process_hicache_events",
    ),
    *_rows(
        FIELD,
        _SCHEDULER,
        "_request_dispatcher",
        "enable_hierarchical_cache",
        "enable_priority_scheduling",
        "last_batch",
        "policy",
        "running_batch",
        "schedule_low_priority_values_first",
        "schedule_policy",
        "server_args",
        "tp_size",
    ),
    *_rows(CALL, "sglang.utils", "TypeBasedDispatcher.__iadd__"),
    *_rows(FIELD, f"{_BATCH}.ScheduleBatch", "batch_is_full", "decoding_reqs", "device", "forward_mode", "reqs"),
    *_rows(FIELD, f"{_BATCH}.ScheduleBatch", "sampling_info"),
    *_rows(CALL, "sglang.srt.runtime_context", "get_parallel"),
    # executor.py, request_state.py, ledger.py, state_report.py
    *_rows(CALL, "sglang.srt.mem_cache.common", "release_kv_cache(req, tree_cache, checkpoint)"),
    *_rows(CALL, _SCHEDULER, "get_num_allocatable_reqs(running_bs, running_batch)"),
    *_rows(FIELD, _SCHEDULER, "forward_ct", "max_req_input_len", "max_total_num_tokens", "page_size"),
    *_rows(FIELD, _SCHEDULER, "token_to_kv_pool_allocator"),
    *_rows(CALL, _TREE, "checkpoint(req, up_to)", "evictable_size", "lock(node_id)", "unlock"),
    *_rows(FIELD, _TREE, "ongoing_write_through"),
    *_rows(FIELD, f"{_BATCH}.ReqKvInfo", "cache_protected_len", "holds_kv", "kv_allocated_len", "kv_committed_len"),
    *_rows(FIELD, "sglang.srt.mem_cache.base_prefix_cache.TreeLock", "node"),
    *_rows(FIELD, "sglang.srt.managers.cache_controller.HiCacheController", "mem_pool_host"),
    *_rows(FIELD, "sglang.srt.mem_cache.pool_host.base.HostKVCache", "size"),
    *_rows(CALL, "sglang.srt.mem_cache.pool_host.base.HostKVCache", "available_size"),
    *_rows(CALL, f"{_BATCH}.ScheduleBatch", "filter_batch(keep_indices)"),
    *_rows(CALL, f"{_BATCH}.Req", "init_next_round_input(tree_cache)", "next_output_finishes_by_length"),
    *_rows(CALL, f"{_BATCH}.Req", "refresh_fill_ids", "reset_for_retract"),
    *_rows(
        FIELD,
        f"{_BATCH}.Req",
        "_is_reasoning_over",
        "beam_group",
        "extend_end",
        "extend_len",
        "finished_reason",
        "full_untruncated_fill_ids",
        "host_hit_length",
        "host_loaded_length",
        "input_embeds",
        "is_retracted",
        "kv",
        "last_node",
        "lock",
        "logprob_start_len",
        "multimodal_inputs",
        "origin_input_ids",
        "output_ids",
        "positional_embed_overrides",
        "prefix_len",
        "priority",
        "require_reasoning",
        "return_hidden_states",
        "return_indexer_topk",
        "return_logprob",
        "return_routed_experts",
        "return_sampling_mask",
        "send_token_offset",
        "session",
        "skip_radix_cache_insert",
        "stream",
        "to_finish",
    ),
    # kv.py
    *_rows(CALL, _CONTROLLER, "start_writing", "load(host_indices, node_id)"),
    *_rows(FIELD, _CONTROLLER, "ack_load_queue", "ack_write_queue", "layer_done_counter", "write_queue"),
    *_rows(FIELD, "sglang.srt.managers.cache_controller.LayerDoneCounter", "num_counters"),
    *_rows(FIELD, "sglang.srt.managers.cache_controller.HiCacheAck", "finish_event", "node_ids", "start_event"),
    *_rows(FIELD, "sglang.srt.managers.cache_controller.HiCacheAck", "timing_enabled"),
    *_rows(CALL, "sglang.srt.managers.cache_controller", "CacheOperation(host_indices, device_indices, node_id)"),
    *_rows(
        CALL, _TREE, "check_hicache_events", "evict_for_alloc(params)", "evict_host(num_tokens)", "is_backuped(node_id)"
    ),
    *_rows(CALL, _TREE, "inc_host_lock_ref(node_id)", "dec_host_lock_ref(node_id, params)"),
    *_rows(CALL, _TREE, "inc_lock_ref(node_id)", "dec_lock_ref(node_id, params)", "ready_to_load_host_cache"),
    *_rows(CALL, _TREE, "is_load_back_event_done(consumer_index)", "init_load_back(params)"),
    *_rows(CALL, _TREE, "_all_reduce(data)", "_apply_cache_actions(actions)", "_finish_write_through_ack(ack_id)"),
    *_rows(FIELD, _TREE, "load_back_threshold", "ongoing_load_back", "req_to_token_pool", "tree_core"),
    *_rows(FIELD, _TREE, "write_through_threshold"),
    *_rows(CALL, "sglang.srt.mem_cache.unified_radix_cache", "_OngoingLoadBack", "_OngoingWriteThrough"),
    *_rows(
        CALL, _CORE, "build_load_back_spec(node_id)", "commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)"
    ),
    *_rows(CALL, _CORE, "is_full_device_evicted(node_id)", "finish_load_back(anchor_node_id)"),
    *_rows(FIELD, "sglang.srt.mem_cache.pool_host.group.HostPoolGroup", "anchor_entry", "logical_size", "size"),
    *_rows(FIELD, "sglang.srt.mem_cache.pool_host.base.HostKVCache", "logical_size", "page_num"),
    *_rows(CALL, "sglang.srt.mem_cache.pool_host.base.HostKVCache", "clear"),
    *_rows(FIELD, f"{_BATCH}.Req", "best_match_node"),
    *_rows(FIELD, f"{_BATCH}.ReqKvInfo", "req_pool_idx"),
    *_rows(FIELD, f"{_BATCH}.ScheduleBatch", "hicache_consumer_index"),
    # admission.py
    *_rows(OVERRIDE, "sglang.srt.managers.schedule_policy.SchedulePolicy", "calc_priority(waiting_queue)"),
    *_rows(
        OVERRIDE,
        _ADDER,
        "add_one_req(req)",
        "_get_running_request_total_token_offset(req)",
        "_select_prefill_admission(req, total_tokens)",
        "_update_prefill_budget(prefix_len, extend_input_len, max_new_tokens)",
    ),
    *_rows(FIELD, "sglang.srt.mem_cache.prefill_budget.PrefillBudget", "total_offset"),
    *_rows(FIELD, "sglang.srt.managers.schedule_policy._PrefillAdmission", "max_new_tokens"),
    *_rows(FIELD, _ADDER, "can_run_list", "memory_budget", "per_req_token_overhead", "rem_chunk_tokens"),
    *_rows(FIELD, "sglang.srt.managers.schedule_policy", "AddReqResult.NO_TOKEN", "AddReqResult.OTHER"),
    # streamer.py
    *_rows(OVERRIDE, _STREAMER, "stream_output(reqs)"),
    # penalties.py
    *_rows(FIELD, f"{_PENALTY}.orchestrator.BatchedPenalizerOrchestrator", "is_required", "penalizers"),
    *_rows(CALL, f"{_PENALTY}.orchestrator._BatchedPenalizer", "is_prepared"),
    *_rows(
        FIELD,
        f"{_PENALTY}.frequency_penalty.BatchedFrequencyPenalizer",
        "cumulated_frequency_penalties",
        "frequency_penalties",
    ),
    *_rows(
        FIELD,
        f"{_PENALTY}.presence_penalty.BatchedPresencePenalizer",
        "cumulated_presence_penalties",
        "presence_penalties",
    ),
    *_rows(
        FIELD,
        f"{_PENALTY}.repetition_penalty.BatchedRepetitionPenalizer",
        "cumulated_repetition_penalties",
        "repetition_penalties",
    ),
    *_rows(FIELD, f"{_PENALTY}.min_new_tokens.BatchedMinNewTokensPenalizer", "len_output_tokens"),
    # rids.py
    *_rows(CALL, _SCHEDULER, "collect_inflight_reqs"),
    *_rows(FIELD, _SCHEDULER, "waiting_queue", "grammar_manager", "chunked_req"),
    *_rows(FIELD, "sglang.srt.constrained.grammar_manager.GrammarManager", "grammar_queue"),
    *_rows(FIELD, "sglang.srt.managers.schedule_batch.Req", "rid"),
    # http.py, routes.py, websocket.py, messages.py
    *_rows(HOOK, _HTTP, "_setup_and_run_http_server"),
    *_rows(HOOK, _MANAGER, "create_abort_task(obj)"),
    *_rows(FIELD, _HTTP, "app"),
    *_rows(CALL, _HTTP, "get_global_state"),
    *_rows(FIELD, _MANAGER, "rid_to_state", "server_args"),
    *_rows(FIELD, _MANAGER, "incremental_streaming_output"),
    *_rows(FIELD, "sglang.srt.managers.tokenizer_manager.ReqState", "obj", "out_list"),
    *_rows(FIELD, "sglang.srt.server_args.ServerArgs", "api_key", "admin_api_key"),
    *_rows(CALL, _MANAGER, "config_value", "auto_create_handle_loop", "_async_dispatch_to_scheduler(obj)"),
    *_rows(FIELD, _MANAGER, "get_internal_state_communicator"),
    *_rows(CALL, "sglang.srt.utils.auth", "auth_level(level)", "AuthLevel.ADMIN_OPTIONAL", "AuthLevel.NORMAL"),
    *_rows(
        CALL,
        "sglang.srt.utils.auth",
        "decide_request_auth(method, path, authorization_header, api_key, admin_api_key, auth_level)",
    ),
    *_rows(CALL, _IO, "hook_custom_types"),
    *_rows(CALL, _IO, "GetInternalStateReq(rid)", "GetInternalStateReqOutput(internal_state)"),
    *_rows(FIELD, _IO, "GetInternalStateReqOutput.internal_state", "BaseReq.rid", "AbortReq.abort_all"),
    *_rows(FIELD, "sglang.srt.environ", "envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"),
    *_rows(FIELD, "sglang.srt.sampling.sampling_params.SamplingParams", "custom_params"),
    *_rows(
        FIELD,
        "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest",
        "custom_params",
        "rid",
        "stream_reasoning",
    ),
    *_rows(FIELD, "sglang.srt.entrypoints.openai.protocol.CompletionRequest", "custom_params", "rid"),
    # metrics.py
    *_rows(FIELD, _SCHEDULER, "metrics_collector", "metrics_reporter"),
    *_rows(FIELD, f"{_PARTS}.metrics_reporter.SchedulerMetricsReporter", "current_scheduler_metrics_enabled"),
)


def installed_release() -> str:
    """The version of the installed SGLang; "none" without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def release_problem(release: str) -> str | None:
    """Why this release is refused; None when it is supported or the user insists."""
    if release in TESTED_RELEASES or os.environ.get(ENV_ALLOW_UNTESTED) == "1":
        return None
    return (
        f"tokenflow: SGLang {release} is not a release this package was tested with. {FIX}; "
        f"or try it with {ALLOW_UNTESTED_FLAG} (or {ENV_ALLOW_UNTESTED}=1)."
    )


def check(release: str | None = None, uses: Iterable[Use] | None = None) -> list[str]:
    """All problems of the table with the SGLang that is installed; empty when it fits. Imports what the rows name.

    Each problem names release, hook and fix.
    """
    release = installed_release() if release is None else release
    found = [release_problem(release)]
    found += [_problem(use, release) for use in (USES if uses is None else uses)]
    return [problem for problem in found if problem is not None]


def _problem(use: Use, release: str) -> str | None:
    def says(what: str) -> str:
        return f"tokenflow: SGLang {release}: {use.kind} {use.path}: {what}. {FIX}."

    try:
        target = pkgutil.resolve_name(use.path)
    except (ImportError, AttributeError) as error:
        if _is_instance_field(use):
            return None
        return says(f"does not exist ({error})")
    if not use.params:
        return None
    missing = [name for name in use.params if not _accepts(target, name)]
    return says(f"no longer takes {', '.join(missing)}") if missing else None


def _accepts(target: Any, name: str) -> bool:
    """Whether the callable has this parameter; what Python cannot introspect is taken to have it."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _is_instance_field(use: Use) -> bool:
    """Whether a class, or a base of it, assigns or declares the attribute only on its instances."""
    owner, _, name = use.path.rpartition(".")
    if use.kind != FIELD:
        return False
    try:
        cls = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    if not isinstance(cls, type):
        return False
    if any(name in getattr(base, "__annotations__", {}) for base in cls.__mro__):
        return True
    return any(re.search(rf"\bself\.{re.escape(name)}\b", _source(base)) for base in cls.__mro__)


@cache
def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
