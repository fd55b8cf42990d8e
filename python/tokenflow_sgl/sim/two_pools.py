"""DistServe: one GPU for prompts, one for decoding, and a link between them (Zhong et al., OSDI'24).

Owns the composition. Invariant: load per GPU is that of the other servers: two GPUs get the scenario's requests and as
many again, drawn with another seed, and only the scenario's own are reported.

Taken from the paper: prompts are computed first come, first served, in batches up to a token limit and without chunks;
the decoding side pulls KV when it has memory, keeps none free for the future, and sends away the last that came when it
runs out (as vLLM, on which it was built). Assumed in its favour: prompts' KV never lacks memory where they are
computed; each transfer has the GPU's whole PCIe link, without set-up time; a stream that was sent away comes back
without computing anything. Against it: prefixes that prompts share are computed each time, for it caches none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..core.qoe import StreamRecord
from ..core.rivals.vllm import Vllm
from ..workload.arrivals import Request
from .run import TOO_LONG, Progress, Run, Simulation
from .settings import EngineSettings
from .timing import StepWork, TimingModel


@dataclasses.dataclass(frozen=True, slots=True)
class _FreePrompts:
    """Step times of a GPU to which prompts come computed."""

    timing: TimingModel

    @property
    def kv_bytes_per_token(self) -> int:
        return self.timing.kv_bytes_per_token

    def step_s(self, work: StepWork) -> float:
        return self.timing.step_s(dataclasses.replace(work, prefill=(), decoding=max(1, work.decoding)))

    def least_prefill_s(self, new_tokens: int) -> float:
        return 0.0

    def publish_s(self, context_tokens: int) -> float:
        return 0.0

    def pass_s(self, step_s: float, publish_s: float) -> float:
        return step_s


def simulate_two_pools(
    requests: Sequence[Request],
    twins: Sequence[Request],
    *,
    settings: EngineSettings,
    timing: TimingModel,
    store_bytes_s: float,
    load_bytes_s: float,
    progress: Progress | None = None,
) -> Run:
    """Raises ValueError for requests that follow others: a pool of its own for prompts does not see what was read.

    What the other servers refuse is refused here as well: with prompts computed elsewhere a little more would fit, and
    a request that fails at one server and not at another makes their tables incomparable.
    """
    asked = [*requests, *(dataclasses.replace(t, rid=f"twin-{t.rid}") for t in twins)]
    if any(r.after is not None for r in asked):
        raise ValueError("distserve: follow-up turns, valid: scenarios of single turns")
    every = [r for r in asked if settings.can_serve(prompt_tokens=r.prompt_len, answer_tokens=r.answer_tokens)]
    first_s = _prompts(every, timing, settings.chunk_tokens)
    moved = [
        dataclasses.replace(
            r, sent_s=first_s[r.rid] + r.prompt_len * timing.kv_bytes_per_token / load_bytes_s,
            answer_tokens=r.answer_tokens - 1, max_tokens=max(1, r.max_tokens - 1),
        )
        for r in every
        if r.answer_tokens > 1
    ]  # fmt: skip
    decoding = dataclasses.replace(settings, batching="mixed", copies="none", chunk_tokens=1 << 30)
    run = Simulation(
        Vllm(), moved, settings=decoding, timing=_FreePrompts(timing), store_bytes_s=store_bytes_s,
        load_bytes_s=load_bytes_s, progress=progress,
    ).run()  # fmt: skip
    rest = {record.rid: record for record in run.records}
    run.records = [_joined(r, first_s.get(r.rid), rest.get(r.rid)) for r in requests]
    return run


def _prompts(requests: Sequence[Request], timing: TimingModel, batch_tokens: int) -> dict[str, float]:
    """When each prompt is computed, which is when its first token is there."""
    queue = sorted(requests, key=lambda r: (r.sent_s, r.rid))
    done: dict[str, float] = {}
    now_s, at = 0.0, 0
    while at < len(queue):
        now_s = max(now_s, queue[at].sent_s)
        batch, tokens = [queue[at]], queue[at].prompt_len
        for r in queue[at + 1 :]:
            if r.sent_s > now_s or tokens + r.prompt_len > batch_tokens:
                break
            batch.append(r)
            tokens += r.prompt_len
        now_s += timing.step_s(StepWork(prefill=tuple((r.prompt_len, 0) for r in batch)))
        done.update((r.rid, now_s) for r in batch)
        at += len(batch)
    return done


def _joined(request: Request, first_s: float | None, rest: StreamRecord | None) -> StreamRecord:
    """A request that failed delivers nothing, its first token neither: it would count as a wait that ended."""
    error = TOO_LONG if first_s is None else None if rest is None else rest.error
    times: tuple[float, ...] = ()
    if first_s is not None and error is None:
        times = (first_s, *(() if rest is None else rest.arrivals_s))
    return StreamRecord(
        request.rid, request.group, request.sent_s, times, request.read_rate_tok_s, request.answer_tokens, error
    )
