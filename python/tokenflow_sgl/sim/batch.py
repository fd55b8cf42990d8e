"""How the engine forms its batch: SGLang's admission and retraction, or prompts mixed with decoding.

Owns the reservation for the future (SGLang's new-token ratio). Decides nothing of its own: order, reservation and cap
are the plan's where it has them. Invariant: memory is looked at before it is taken, so that nothing fails half-way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .executor import SimExecutor
from .requests import SimRequest
from .timing import StepWork

# SGLang 0.5: environ.py and schedule_policy.py.
_INIT_RATIO, _MIN_FACTOR, _DECAY_STEPS = 0.7, 0.14, 600
_CLIP_MAX_NEW = 4096
_RETRACT_STEPS = 20  # of growth, in the ratio after a retraction


@dataclass(slots=True)
class Batch:
    prefill: list[SimRequest] = field(default_factory=list)
    work: list[tuple[int, int]] = field(default_factory=list)  # (new tokens, context before) of each
    prefill_tokens: int = 0
    loaded_tokens: int = 0
    decodes: bool = False


class Batcher:
    def __init__(self, executor: SimExecutor) -> None:
        self.ex = executor
        self._most_ratio = min(1.0, _INIT_RATIO * executor.settings.conservativeness)
        self._least_ratio = self._most_ratio * _MIN_FACTOR
        self.ratio = self._most_ratio

    def idle(self) -> None:
        self.ratio = self._most_ratio

    def form(self) -> Batch:
        """Takes the memory of the step."""
        ex = self.ex
        for req in ex.prefilled:
            if not req.finished:
                ex.join(req)
        ex.prefilled = []
        batch = Batch()
        mixed = ex.settings.batching != "prefill_first"
        if mixed:
            self._decode(batch)
        if not (ex.prefill_tokens == 0 and ex.running):
            self._prefill(batch, len(ex.running) if mixed else 0)
        if not batch.prefill and not mixed:
            self._decode(batch)
        ex.batch_formed(empty=not batch.prefill and not batch.decodes)
        ex.rode_along = bool(batch.prefill) and batch.decodes and ex.settings.batching == "mixed_chunk"
        return batch

    # ---- decoding

    def _decode(self, batch: Batch) -> None:
        ex = self.ex
        if not ex.running:
            return
        if ex.opening_pages() > ex.memory.tree.free_pages + ex.memory.tree.evictable_pages:
            self._retract()
        else:
            self.ratio = max(self._least_ratio, self.ratio - (self._most_ratio - self._least_ratio) / _DECAY_STEPS)
        if ex.running:
            ex.memory.tree.take(ex.opening_pages())
            batch.decodes = True

    def _retract(self) -> None:
        """Who has made least goes first, and of those the longest prompt, until the next step fits.

        The last one goes too. Alone it would always fit, so others hold what it lacks: copies under way, loads, a
        prompt half computed. It comes back when they let go; to let it run would take pages that are not there.
        """
        ex = self.ex
        order = sorted(ex.running.values(), key=lambda r: (r.output_at(ex.decodes), -r.prompt_tokens))
        for victim in order:
            if ex.opening_pages() * ex.page <= ex.memory.free_tokens:
                break
            kv = ex.leave(victim)
            ex.counters.retractions += 1
            ex.requeue(victim, kv)
        made = sum(r.output_at(ex.decodes) for r in ex.running.values()) + _RETRACT_STEPS * len(ex.running)
        self.ratio = min(1.0, made / (sum(r.max_tokens for r in ex.running.values()) + 1))

    # ---- prefill

    def _reserved(self) -> float:
        ex = self.ex
        if ex.reserve_tokens is not None:
            return ex.reserve_tokens
        left = [r.max_tokens - r.output_at(ex.decodes) for r in ex.running.values()]
        return sum([_CLIP_MAX_NEW if tokens > _CLIP_MAX_NEW else tokens for tokens in left]) * self.ratio

    def _prefill(self, batch: Batch, decoding: int) -> None:
        ex, memory = self.ex, self.ex.memory
        if ex.chunked is None and not ex.waiting:
            return
        reserved = self._reserved()
        budget = memory.free_tokens - reserved
        cap = ex.settings.chunk_tokens - decoding
        if ex.prefill_tokens is not None:
            cap = min(cap, ex.prefill_tokens)
        left = cap
        if ex.chunked is not None:
            left -= self._go_on(batch, ex.chunked, left, budget)
            budget = memory.free_tokens - reserved
        order = list(ex.waiting) if ex.order is None else ex.order
        for rid in order:
            req = ex.waiting.get(rid)
            if req is None or req.loading is not None:
                continue
            if len(ex.running) + len(batch.prefill) >= ex.settings.max_running:
                break
            context = req.prompt_tokens + req.output_tokens
            device, host = memory.hit_pages(req, context)
            at_admission = ex.settings.loads == "at_admission" and ex.settings.copies != "none"
            loaded = host * ex.page if at_admission and not req.held_pages else 0
            cached = device * ex.page
            need = context - cached + ex.page
            if ex.reserve_tokens is None:
                need += min(req.max_tokens - req.output_tokens, _CLIP_MAX_NEW)
            locks = 0 if req.held_pages else (device - memory.tree.held_pages(req.path)) * ex.page
            if need >= budget - locks and not self._fits_alone(batch, context, device, locks):
                ex.outcome.refused.append(rid)
                break
            extend = context - cached - loaded
            cut = extend > left
            if left < ex.page or (cut and ex.chunked is not None):
                break
            budget -= need + locks
            left -= self._admit(batch, req, device, loaded, left // ex.page * ex.page if cut else extend, cut)
        batch.prefill_tokens = cap - left

    def _fits_alone(self, batch: Batch, context: int, device: int, locks: int) -> bool:
        """An empty engine takes whoever is first, if it fits at all."""
        ex = self.ex
        if ex.running or batch.prefill or ex.chunked is not None:
            return False
        return (ex.memory.pages(context + 1) - device) * ex.page <= ex.memory.free_tokens - locks

    def _go_on(self, batch: Batch, req: SimRequest, left: int, budget: float) -> int:
        """A prompt under way goes on, by a whole chunk even where the reservation leaves nothing."""
        ex = self.ex
        limit = min(left, int(budget)) if budget > 0 else left
        limit = min(limit, ex.memory.free_tokens)
        tokens = req.target_tokens - req.kv_tokens
        if tokens > limit:
            tokens = limit // ex.page * ex.page
        if tokens <= 0:
            return 0
        batch.prefill.append(req)
        batch.work.append((tokens, req.kv_tokens))
        ex.memory.compute(req, tokens)
        if req.output_tokens:
            ex.counters.recomputed_tokens += tokens
        if req.kv_tokens >= req.target_tokens:
            ex.chunked = None
        return tokens

    def _admit(self, batch: Batch, req: SimRequest, device: int, loaded: int, tokens: int, cut: bool) -> int:
        ex, memory = self.ex, self.ex.memory
        context = req.prompt_tokens + req.output_tokens
        del ex.waiting[req.rid]
        memory.enter(req, device)
        if loaded:
            loaded = memory.load_now(req, context)
            batch.loaded_tokens += loaded
            ex.counters.loads += 1
            ex.counters.loaded_tokens += loaded
        req.target_tokens = context
        batch.prefill.append(req)
        batch.work.append((tokens, req.kv_tokens))
        memory.compute(req, tokens)
        if cut:
            ex.chunked = req
        if req.output_tokens:
            ex.counters.returns += 1
            ex.counters.recomputed_tokens += tokens - 1
        ex.outcome.admitted.append((req.rid, tokens, loaded))
        return tokens

    def step_work(self, batch: Batch) -> StepWork:
        ex = self.ex
        return StepWork(
            prefill=tuple(batch.work),
            decoding=len(ex.running) if batch.decodes else 0,
            decode_context_tokens=ex.context_tokens + len(ex.running) if batch.decodes else 0,
        )
