"""A real SGLang scheduler in this process: real model, real cache, real event loops; no HTTP and no sockets.

Owns start, submission and collection of streamed output. Invariant: between two `run_until_idle` calls the engine is
idle and upstream's own leak checks have run.
"""

from __future__ import annotations

import math
import os
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenflow_sgl.core.journal import Journal

REPO = Path(__file__).parents[2]
_FAKE_COPY_S = 1e-6  # a token, either way, and of a publish's context


@dataclass
class Stream:
    """What a client would have seen of one request."""

    rid: str
    chunks: list[list[int]] = field(default_factory=list)
    logprobs: list[tuple[float, int]] = field(default_factory=list)
    top_logprobs: list[list[int]] = field(default_factory=list)  # token ids, the most probable first
    times_s: list[float] = field(default_factory=list)  # of each token, on the fake clock
    sent_s: float = 0.0
    finish: Any = None
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        return [t for chunk in self.chunks for t in chunk]


_FAR_S = 3600.0


class Engine:
    """`flags` are server flags; `settings` those of TokenflowSettings; None runs stock's scheduler class."""

    def __init__(
        self,
        flags: Sequence[str] = (),
        settings: dict[str, Any] | None = None,
        *,
        stock: bool = False,
        model: Path = REPO / "models" / "tiny",
        device: str = "cpu",
        tp_rank: int = 0,
        share_ports: Callable[[Any], Any] = lambda make: make(),
    ) -> None:
        """`share_ports` gets a maker of PortArgs and returns those that all ranks use."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.managers import scheduler as upstream
        from sglang.srt.server_args import PortArgs, prepare_server_args

        from tokenflow_sgl.adapter import args
        from tokenflow_sgl.bench.models import ensure_model

        if model == REPO / "models" / "tiny":
            ensure_model("tiny", model)
        argv = ["--model-path", str(model), "--device", device, "--skip-server-warmup"]
        if device == "cpu":
            argv += ["--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.1"]
        argv += ["--enable-hierarchical-cache", "--hicache-ratio", "4"]
        argv += ["--hicache-write-policy", "write_through", "--random-seed", "1", *flags]
        self.server_args = prepare_server_args(argv)
        args.attach(self.server_args, args.TokenflowSettings.from_mapping(settings or {}))
        ports = share_ports(lambda: PortArgs.init_new(self.server_args))
        rank = upstream.spawn_world_rank(self.server_args, tp_rank=tp_rank, pp_rank=0)
        ranks = upstream.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=tp_rank)
        upstream.publish(self.server_args, role="scheduler", ranks=ranks)
        if stock:
            self.scheduler = upstream.Scheduler(self.server_args, ports)
        else:
            from tokenflow_sgl.adapter.scheduler import TokenFlowScheduler

            self.scheduler = TokenFlowScheduler(self.server_args, ports)
        self.streams: dict[str, Stream] = {}
        self.iterations = 0
        self.now_s = 0.0  # the fake clock, once it is set
        self._cost: tuple[float, float] | None = None
        if not stock:
            self._number_transitions()
        sink = _Sink(self._collect)
        object.__setattr__(self.scheduler.ipc_channels, "send_to_detokenizer", sink)
        object.__setattr__(self.scheduler.ipc_channels, "send_to_tokenizer", sink)
        self.scheduler.output_streamer.send_to_detokenizer = sink

    # ---- requests

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int = 32, *, stream: bool = True,
               tokenflow: dict[str, Any] | None = None, return_logprob: bool = False, top_logprobs_num: int = 0,
               lora_id: str | None = None, custom_params: dict[str, Any] | None = None,
               custom_logit_processor: str | None = None, priority: int | None = None,
               extra_key: str | None = None, **sampling: Any) -> Stream:  # fmt: skip
        """Queue a request as the tokenizer would send it. Greedy and without EOS unless `sampling` says otherwise."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
        params = dict(custom_params or {})
        if tokenflow is not None:
            params["tokenflow"] = tokenflow
        sampling["custom_params"] = params or None
        parameters = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
        parameters.normalize(self.scheduler.tokenizer)
        parameters.verify(self.scheduler.model_config.vocab_size)
        request = TokenizedGenerateReqInput(
            rid=rid, input_text="", input_ids=array("q", prompt), input_embeds=None, mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters, return_logprob=return_logprob, logprob_start_len=-1,
            top_logprobs_num=top_logprobs_num, token_ids_logprob=None, stream=stream, lora_id=lora_id,
            custom_logit_processor=custom_logit_processor, priority=priority,
            extra_key=extra_key,
        )  # fmt: skip
        request.time_stats = APIServerReqTimeStats()
        self.streams[rid] = Stream(rid, prompt_tokens=len(prompt), sent_s=self.now_s)
        self.send(request)
        return self.streams[rid]

    def send(self, message: Any) -> None:
        """Any message, as if it had been received in the next iteration."""
        self.scheduler._deferred_input_requests.append(message)

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.send(AbortReq(rid=rid, abort_all=abort_all))

    # ---- running

    def run(self, until: Callable[[Engine], bool], *, max_iterations: int = 2_000_000, max_s: float = 300.0) -> None:
        """Run the real event loop until `until(engine)`, asked at the start of every iteration."""
        scheduler = self.scheduler
        ingest = type(scheduler).ingest_requests
        deadline = time.monotonic() + max_s
        first = self.iterations

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.iterations += 1
            if self._cost is not None:
                self.now_s += self._last_batch_s(*self._cost)
            scheduler.gracefully_exit = until(self)
            if not scheduler.gracefully_exit and (
                self.iterations - first > max_iterations or time.monotonic() > deadline
            ):
                raise TimeoutError(f"not done after {self.iterations - first} iterations: {self.unfinished()}")
            return ingest(scheduler, *args, **kwargs)

        scheduler.ingest_requests = stepped
        try:
            scheduler.gracefully_exit = False
            scheduler.run_event_loop()
        finally:
            scheduler.gracefully_exit = False
            del scheduler.ingest_requests

    def run_until_done(
        self, rids: Sequence[str] | None = None, each: Callable[[Engine], None] | None = None, **limits: Any
    ) -> None:
        """Until the streams named (all by default) have ended, then until the engine is idle and checked for leaks."""
        wanted = list(self.streams if rids is None else rids)

        def done(engine: Engine) -> bool:
            if each is not None:
                each(engine)
            return all(engine.streams[rid].finish is not None for rid in wanted)

        self.run(done, **limits)
        if rids is None:
            self.run_until_idle()

    def run_until_idle(self) -> None:
        """Idle iterations run upstream's leak checks of pool, rows and tree; they raise."""
        idle = 0

        def settled(engine: Engine) -> bool:
            nonlocal idle
            idle = idle + 1 if engine.scheduler.is_fully_idle() else 0
            return idle > 5

        self.run(settled, max_s=60.0)

    def fake_clock(self, step_s: float, prefill_tok_s: float = math.inf, *, copy_deadline_s: float = _FAR_S) -> None:
        """From now on rank 0's clock counts iterations, `step_s` each and more for a prefill, and copies take what
        their size says: what the policy believes is the same in every run, however slow the machine. Called again, only
        the costs change. Idle iterations count as much and take no time at all, so that a copy, which takes real time,
        would be overdue after a few milliseconds: it has no deadline unless the test is about one."""
        first, self._cost = self._cost is None, (step_s, prefill_tok_s)
        tier, ledger = self.scheduler.host_tier, self.scheduler.ledger
        if tier is not None:
            tier.config = replace(tier.config, copy_deadline_s=copy_deadline_s)
        if not first:
            return
        self.now_s = ledger.now_s  # else what was to wait until a time of the real clock would wait for ever
        tick = type(ledger).tick

        def stepped(event: Any) -> None:
            last_s = None if event.last_step_s is None else self._last_batch_s(*self._cost)
            copies = {
                name: tuple((tokens, tokens * _FAKE_COPY_S) for tokens, _ in getattr(event, name))
                for name in ("stores_s", "loads_s", "publishes_s")
            }
            tick(ledger, replace(event, now_s=self.now_s, last_step_s=last_s, **copies))

        ledger.tick = stepped

    def _last_batch_s(self, step_s: float, prefill_tok_s: float) -> float:
        batch = self.scheduler.last_batch
        prefill = batch is not None and batch.forward_mode.is_extend()
        return step_s + (sum(r.extend_len for r in batch.reqs) / prefill_tok_s if prefill else 0.0)

    def use(self, policy: Any, journal: Journal | None = None) -> None:
        """Another policy, between runs. It has seen nothing of what was before."""
        self.scheduler.ledger.drain()
        self.scheduler.tokenflow_policy = policy
        self.scheduler.journal = journal

    def _number_transitions(self) -> None:
        """Parks and returns carry the number of the forward step and of the iteration they happened in."""
        ledger = self.scheduler.ledger
        transition = type(ledger).transition

        def numbered(rid: str, what: str, tokens: int) -> None:
            transition(ledger, rid, what, tokens)
            ledger.transitions[-1].update(step=self.scheduler.forward_ct, iteration=self.iterations)

        ledger.transition = numbered

    def idle_report(self) -> dict[str, Any]:
        """What must balance when nobody is served; see `unbalanced`."""
        s = self.scheduler
        tree = s.tree_cache
        report = {
            "idle": s.is_fully_idle(),
            "device": (self.free_tokens(), s.max_total_num_tokens),
            "rows": (s.req_to_token_pool.available_size(), s.req_to_token_pool.size),
            "locked": (tree.protected_size(), 0),
            "copies": (len(tree.ongoing_write_through) + len(tree.ongoing_load_back), 0),
            "queues": (len(s.waiting_queue) + len(s.grammar_manager.grammar_queue), 0),
        }
        if hasattr(s, "ledger"):
            policy = s.tokenflow_policy
            book = getattr(getattr(policy, "streams", None), "by_rid", {})
            away = getattr(policy, "returns_at", {})
            report["remembered"] = (len(book) + len(away) + len(s.ledger._withheld), 0)
        return report

    def unfinished(self) -> dict[str, int]:
        return {s.rid: len(s.tokens) for s in self.streams.values() if s.finish is None}

    def reset(self) -> None:
        """Forget streams and empty both cache tiers; the engine must be idle."""
        assert self.scheduler.flush_cache(empty_cache=False), "the engine is not idle"
        self.streams.clear()

    def evict_device(self) -> int:
        """Push everything evictable off the device; tokens evicted. What is on the host stays there."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        return int(self.scheduler.tree_cache.evict(EvictParams(num_tokens=10**9)).num_tokens_evicted)

    def settle_stores(self) -> None:
        """Wait until every copy to the host begun so far has ended, so that how busy the machine is decides nothing."""
        for ack in self.scheduler.tree_cache.cache_controller.ack_write_queue:
            ack.finish_event.synchronize()

    def free_tokens(self) -> int:
        scheduler = self.scheduler
        return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())

    # ---- output

    def _collect(self, message: Any) -> None:
        kind = type(message).__name__
        if kind == "BatchTokenIDOutput":
            for i, rid in enumerate(message.rids):
                self._collect_one(message, i, self.streams.setdefault(rid, Stream(rid)))
        elif kind == "AbortReq":
            stream = self.streams.setdefault(message.rid, Stream(message.rid))
            stream.finish = message.finished_reason or {"type": "abort"}

    def _collect_one(self, message: Any, i: int, stream: Stream) -> None:
        stream.chunks.append(list(message.output_ids[i]) if message.output_ids else [])
        stream.times_s += [self.now_s] * len(stream.chunks[-1])
        stream.completion_tokens = message.completion_tokens[i]
        stream.prompt_tokens = message.prompt_tokens[i]
        stream.cached_tokens = message.cached_tokens[i]
        if message.output_token_logprobs_val and message.output_token_logprobs_val[i] is not None:
            stream.logprobs += zip(
                message.output_token_logprobs_val[i], message.output_token_logprobs_idx[i], strict=True
            )
        if message.output_top_logprobs_idx and message.output_top_logprobs_idx[i]:
            stream.top_logprobs += [list(ids) for ids in message.output_top_logprobs_idx[i]]
        if message.finished_reasons[i] is not None:
            assert stream.finish is None, f"{stream.rid} ended twice"
            stream.finish = message.finished_reasons[i]


class _Sink:
    def __init__(self, take: Callable[[Any], None]) -> None:
        self.take = take

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.take(output)


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids of the tiny model's vocabulary, past its special ones."""
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(tokens)]
