"""SGLang's scheduler with the policy at the top of every step.

Owns thin overrides; every one calls upstream's. Decides nothing and copies no upstream body. Invariant: nothing here
reads a clock but `_poll_timeout_aborts`, which runs on the entry rank alone and sends its reading to all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.io_struct import GetInternalStateReqOutput
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from ..core.driver import check_plan, drive_step
from ..core.journal import Journal
from ..core.policies import header_of, make_policy
from ..core.types import EngineView, Event, Plan, Tick
from . import checks, penalties, state_report
from .admission import PlannedOrder, adder_class
from .args import settings_of
from .executor import SglangExecutor
from .kv import HostTier
from .ledger import Ledger
from .messages import AckReq, TickReq, state_since
from .metrics import SchedulerMetrics
from .request_state import RequestState
from .rids import live_requests, only_exact
from .streamer import ParkAwareStreamer

logger = logging.getLogger(__name__)
_METRICS_EVERY = 32  # steps
_HELD_SLEEP_S = 0.0005  # while everybody is held and nothing runs: else the loop burns a core, and a reader cannot tell


class TokenFlowScheduler(Scheduler):
    """One step: ingest (clock, requests, aborts) -> drive_step -> upstream forms and runs its batch -> results."""

    # ---- making

    def __init__(self, server_args: Any, port_args: Any) -> None:
        with checks.host_memory_or_exit(server_args):
            super().__init__(server_args, port_args)

    def init_running_status(self) -> None:
        super().init_running_status()
        self.tokenflow_settings = settings_of(self.server_args)
        checks.refuse_runtime(self, self.tokenflow_settings)
        # Upstream accepts prompts up to the pool's size less 6, but admits none that leaves no page and a token beside
        # it: such a one waits for ever, and under stock's order everybody waits behind it. The HTTP process is told
        # this limit and answers 400.
        self.max_req_input_len = min(self.max_req_input_len, self.max_total_num_tokens - self.page_size - 1)
        self.ledger = Ledger(knows_places=get_parallel().dp_rank is None)
        settings = self.tokenflow_settings
        self.host_tier = None if settings.policy == "fcfs" else HostTier(self, self.ledger, settings.config)
        self.executor = SglangExecutor(self, self.ledger, self.host_tier)
        script = settings.script() if settings.script_path is not None else None
        self.tokenflow_policy = make_policy(settings.policy, settings.config, script)
        self.tokenflow_metrics: SchedulerMetrics | None = None
        self.journal = self._open_journal(header_of(settings.policy, settings.config, script))
        self._recorder = self._checked if settings.check_plans else self.journal
        self._adder_class = adder_class(self.executor.admission)
        self._plan_prefill_tokens: int | None = None
        # In the overlap loop a pass launches a batch and then waits for the one before, whose time it takes; but on a
        # CPU, where launching is computing.
        self._times_batch_before = self.enable_overlap and self.device != "cpu"
        self._sizes_before = (0, 0)
        self._last_tick_s: float | None = None
        self._steps = 0
        self._idle = True
        logger.info("TokenFlow scheduler in force: policy %s", self.tokenflow_settings.policy)

    def _open_journal(self, header: dict[str, Any]) -> Journal | None:
        path = self.tokenflow_settings.journal_path
        if path is None:
            return None
        # One file a rank: the ranks' journals must be identical, and that can be checked only if they are apart.
        parallel = get_parallel()
        suffix = f".dp{parallel.dp_rank}" if parallel.dp_rank is not None else ""
        suffix += f".rank{parallel.tp_rank}" if self.tp_size > 1 else ""
        return Journal.open(f"{path}{suffix}", header)

    def init_schedule_policy(self) -> None:
        super().init_schedule_policy()
        self.policy = PlannedOrder(
            self.schedule_policy,
            self.tree_cache,
            self.enable_hierarchical_cache,
            self.enable_priority_scheduling,
            self.schedule_low_priority_values_first,
        )
        self.policy.admission = self.executor.admission

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(TickReq, self._on_tick), (AckReq, self._on_acks)])

    def init_metrics_reporter(self) -> None:
        super().init_metrics_reporter()
        if self.metrics_reporter.current_scheduler_metrics_enabled:
            self.tokenflow_metrics = SchedulerMetrics(self.metrics_collector.labels)

    def get_prefill_adder_class(self) -> type[PrefillAdder]:
        return self._adder_class

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return ParkAwareStreamer

    # ---- the clock: read on the entry rank, obeyed on all

    def _poll_timeout_aborts(self) -> list[Any]:
        aborts = super()._poll_timeout_aborts()
        if aborts:
            # A started stream waits because we parked it: its answer must not be cut for that.
            started = {r.rid for r in self.waiting_queue if r.output_ids}
            aborts = [a for a in aborts if a.rid not in started]
        busy, tier = self.last_batch is not None, self.host_tier
        # Copies have deadlines, also on an engine that serves nobody.
        if busy or self.waiting_queue or self.running_batch.reqs or (tier is not None and tier.has_deadlines):
            now_s = time.monotonic()
            step_s = now_s - self._last_tick_s if busy and self._last_tick_s is not None else None
            self._last_tick_s = now_s
            aborts.append(TickReq(now_s=now_s, last_step_s=step_s, **self._timings()))
        else:
            self._last_tick_s = None
        return aborts

    def _timings(self) -> dict[str, tuple[tuple[int, float], ...]]:
        publishes_s, self.executor.publishes_s = tuple(self.executor.publishes_s), []
        copies = {} if self.host_tier is None else self.host_tier.take_timings()
        return {**copies, "publishes_s": publishes_s}

    def _on_tick(self, tick: TickReq) -> None:
        self._timings()  # those of other ranks are nobody's
        self.ledger.tick(Tick(tick.now_s, tick.last_step_s, tick.stores_s, tick.loads_s, tick.publishes_s))

    def _on_acks(self, req: AckReq) -> None:
        for rid, index, consumed_tokens in req.acks:
            self.ledger.reported(rid, index, consumed_tokens)
        for rid, halted in req.halts:
            self.ledger.halted(rid, halted)

    # ---- requests come and go

    def _create_generation_req(self, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        req = super()._create_generation_req(recv_req, *args, **kwargs)
        req.tokenflow = RequestState.of(req, self.tokenflow_settings.config.default_read_rate_tok_s)
        return req

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if req.tokenflow.admitted:
            self.executor.left(req)  # upstream's own retraction or priority preemption
        super()._add_request_to_queue(req, is_retracted)
        if not req.tokenflow.arrived and self.waiting_queue and self.waiting_queue[-1] is req:
            req.tokenflow.arrived = True
            self.ledger.arrived(req.tokenflow.arrival(req), req)

    def requeue_parked(self, req: Any) -> None:
        """Back to the waiting queue by the same door as upstream's retraction."""
        super()._add_request_to_queue(req, is_retracted=True)

    def _abort_on_queued_limit(self, recv_req: Any) -> bool:
        """Only requests that have not started can be refused, and started ones that wait do not count as queued."""
        if recv_req.output_ids:
            return False
        queue = self.waiting_queue
        self.waiting_queue = [r for r in queue if not r.output_ids]
        kept = set(map(id, self.waiting_queue))
        try:
            return super()._abort_on_queued_limit(recv_req)
        finally:
            left = set(map(id, self.waiting_queue))
            self.waiting_queue = [r for r in queue if id(r) not in kept or id(r) in left]

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        super().send_abort_output(abort_req, req)
        if hasattr(req, "tokenflow"):
            if self.host_tier is not None:
                self.host_tier.let_go(req)
            self.ledger.finished(req)

    def abort_request(self, recv_req: Any) -> None:
        """Upstream's, but `u1` never ends `u10`: it matches by the beginning of the id."""
        hit = {id(r) for r in live_requests(self) if recv_req.abort_all or r.rid == recv_req.rid}
        self.ledger.counters["aborts"] += len(hit)
        if recv_req.abort_all:
            return super().abort_request(recv_req)
        with only_exact(self, recv_req.rid):
            return super().abort_request(recv_req)

    # ---- the step

    def _checked(self, events: Sequence[Event], view: EngineView, plan: Plan) -> None:
        """With --tokenflow-check-plans: an illegal plan stops the server, with its journal written up to that step."""
        if self.journal is not None:
            self.journal(events, view, plan)
        problems = check_plan(view, plan)
        assert not problems, f"illegal plan {plan}: {'; '.join(problems)}"

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        executor = self.executor
        if self.host_tier is not None:
            self.host_tier.poll()
        if self._has_nothing_to_decide(running_batch, last_batch):
            if not self._idle and self.tokenflow_metrics is not None:
                state_report.update_metrics(self)
            self._idle = True
            return super().get_next_batch_to_run(running_batch, last_batch)
        woke, self._idle = self._idle, False
        if woke and not self.ledger.has_tick:
            # The clock stood still meanwhile: who came first is let in one step later, with the time it came.
            executor.admission.set((), 0, None)
            result = super().get_next_batch_to_run(running_batch, last_batch)
            self._applied(result.batch_to_run)
            return result
        executor.running_batch, executor.last_batch = running_batch, last_batch
        plan = drive_step(self.tokenflow_policy, executor, self.ledger.drain(), self._recorder)
        self._plan_prefill_tokens = plan.prefill_tokens
        if plan.publish:
            self.ledger.counters["publishes"] += len(plan.publish)
            led = plan.why.get("led_by_forecast", 0.0) > 0.0
            self.ledger.counters["publishes_led_by_forecast"] += len(plan.publish) if led else 0
        result = super().get_next_batch_to_run(running_batch, last_batch)
        executor.batch_formed(result.batch_to_run)
        self._applied(result.batch_to_run)
        executor.running_batch = executor.last_batch = None
        self._steps += 1
        if self.tokenflow_metrics is not None and self._steps % _METRICS_EVERY == 0:
            state_report.update_metrics(self)
        return result

    def _process_hicache_events(self, *args: Any, **kwargs: Any) -> None:
        super()._process_hicache_events(*args, **kwargs)
        if self.host_tier is not None:
            self.host_tier.collect()

    def _has_nothing_to_decide(self, running_batch: Any, last_batch: Any) -> bool:
        """An idle server loops without pause; journaled, its empty steps would fill a disk."""
        live = running_batch.reqs or last_batch is not None or self.waiting_queue or self.chunked_req is not None
        return not (live or self.grammar_manager.grammar_queue or self.ledger.has_news)

    def _should_defer_prefill(self, running_batch: Any) -> bool:
        if self._plan_prefill_tokens == 0 and running_batch.reqs:
            return True
        return super()._should_defer_prefill(running_batch)

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        """Upstream's prefill batch, with those the plan did not name out of sight."""
        admission = self.executor.admission
        held = [r for r in self.waiting_queue if admission.holds(r.rid)]
        if held:
            self.waiting_queue = [r for r in self.waiting_queue if not admission.holds(r.rid)]
        try:
            result = super().get_new_batch_prefill(running_batch)
        finally:
            self.waiting_queue = self.waiting_queue + held if held else self.waiting_queue
        batch = result.batch_to_run
        if batch is not None:
            decoding = set(map(id, batch.decoding_reqs or ()))
            again = [(i, r) for i, r in enumerate(batch.reqs) if r.output_ids and id(r) not in decoding]
            if again:
                penalties.replay(batch, again)
        return result

    def _applied(self, batch: Any) -> None:
        """Tell the ledger what came of the plan: who came in, and what the step computes."""
        admitted: list[tuple[str, int, int]] = []
        prefill_tokens = decoding = 0
        if batch is not None and batch.hicache_consumer_index >= 0:
            self.ledger.counters["copy_waits"] += not self.tree_cache.is_load_back_event_done(
                batch.hicache_consumer_index
            )
        if batch is not None and batch.forward_mode.is_extend():
            riding = set(map(id, batch.decoding_reqs or ()))
            decoding = len(riding)
            for req in batch.reqs:
                if id(req) in riding:
                    continue
                prefill_tokens += req.extend_len
                if req.output_ids:
                    self.ledger.counters["reprefilled_tokens"] += req.extend_len
                if not req.tokenflow.admitted:
                    admitted.append((req.rid, req.extend_len, req.host_loaded_length))
                    self._came_in(req)
        elif batch is not None:
            decoding = len(batch.reqs)
        timed, self._sizes_before = self._sizes_before, (prefill_tokens, decoding)
        self.ledger.applied(
            admitted, self.executor.admission.refused, prefill_tokens, decoding,
            timed=timed if self._times_batch_before else None,
        )  # fmt: skip

    def _came_in(self, req: Any) -> None:
        req.tokenflow.admitted = True
        req.tokenflow.recompute = False
        self.executor.members += 1
        if self.host_tier is not None:
            self.host_tier.let_go(req)
        counters = self.ledger.counters
        counters["loaded_tokens"] += req.host_loaded_length
        if not req.output_ids:
            self.ledger.transition(req.rid, "admit", req.extend_len)
            return
        counters["returns"] += 1
        slack_s = state_report.slack_s(self, req.rid)
        if slack_s is not None and slack_s <= 0.0:
            counters["late_returns"] += 1
        self.ledger.transition(req.rid, "return", req.extend_len)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        self.ledger.emitted(batch.reqs)

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        """Not while a copy that was given up may still write: emptying the cache would hand its pages to others."""
        lost = self.host_tier is not None and bool(self.host_tier.stores.lost)
        return not lost and bool(super().is_fully_idle(*args, **kwargs))

    def flush_cache(self, *args: Any, **kwargs: Any) -> bool:
        flushed = bool(super().flush_cache(*args, **kwargs))
        if flushed and self.host_tier is not None:
            self.host_tier.forget()
            for req in self.waiting_queue:
                req.tokenflow.probe_ct = -1
        return flushed

    def on_idle(self) -> None:
        super().on_idle()
        if self.waiting_queue:
            time.sleep(_HELD_SLEEP_S)

    # ---- telling

    def get_internal_state(self, recv_req: Any) -> Any:
        since = state_since(recv_req.rid)
        if since is not None:
            # Not upstream's state as well: it dumps every server argument, some 5 ms of this thread for each question.
            return GetInternalStateReqOutput(internal_state={"tokenflow": state_report.state(self, since)})
        reply = super().get_internal_state(recv_req)
        reply.internal_state["tokenflow"] = state_report.summary(self)
        return reply
