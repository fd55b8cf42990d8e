"""From a scenario and a seed to the requests that arrive.

Owns the draws. Sends nothing and knows no engine. Invariant: the same scenario, seed and factor give the same requests
on every machine, and the factor of max_tokens changes nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain

from tokenflow_sgl.workload.groups import Group, ReadRate
from tokenflow_sgl.workload.lengths import draw_tokens
from tokenflow_sgl.workload.scenario import Scenario
from tokenflow_sgl.workload.times import arrival_times

# Above the special tokens, below the smallest vocabulary in use: an end marker inside a prompt would be read as one.
PROMPT_ID_LOW = 16
PROMPT_ID_HIGH = 900


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens that is the same wherever its key appears in a run.

    ids: the tokens themselves; None = drawn from the key when asked for (token_ids), since most plans never are.
    """

    key: str
    tokens: int
    ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, key: str, ids: Iterable[int]) -> Segment:
        """A segment of given tokens."""
        held = tuple(ids)
        return cls(key, len(held), held)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a plan. sent_s: seconds after the run's start; answer_tokens: where the answer ends by itself;
    max_tokens: the limit the client asks for, at least answer_tokens; read_rate_tok_s: tokens a second of its reader,
    infinite for a program; reader: "reader", "agent" (a program) or "batch" (nobody watches, nothing is streamed).

    A follow-up names in `after` the turn it follows and is sent think_s after the reader has read that answer to its
    end; its sent_s means nothing. Its prompt is the prompt before, that answer (key "out:" + rid), its own question.
    """

    rid: str
    group: str
    sent_s: float
    segments: tuple[Segment, ...]
    answer_tokens: int
    max_tokens: int
    read_rate_tok_s: float
    reader: str = "reader"
    after: str | None = None
    think_s: float = 0.0

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt as token ids, made anew at each call; an answer in it is drawn too, not what a model said."""
        return tuple(chain.from_iterable(token_ids(segment) for segment in self.segments))


def token_ids(segment: Segment) -> tuple[int, ...]:
    """The tokens of a segment: those given, else drawn from its key alone."""
    if segment.ids is not None:
        return segment.ids
    rnd = random.Random(f"ids/{segment.key}")
    return tuple(rnd.choices(range(PROMPT_ID_LOW, PROMPT_ID_HIGH), k=segment.tokens))


def plan_requests(scenario: Scenario, *, seed: int, max_tokens_factor: float = 1.0) -> tuple[Request, ...]:
    """All requests of one run, in order of sending; each conversation's follow-ups come right behind its first turn.

    seed: any int. max_tokens_factor: >= 1, how much longer than the answer the client's limit is (clients seldom know),
    where the group sets no limit of its own.
    Raises ValueError for a factor below 1, which would cut answers and break the count of tokens.
    """
    if not (math.isfinite(max_tokens_factor) and max_tokens_factor >= 1):
        raise ValueError(f"max_tokens_factor: {max_tokens_factor}, valid: a number >= 1")
    conversations = [
        turns
        for group in scenario.groups
        for turns in _GroupDraw(scenario.name, group, seed=seed, factor=max_tokens_factor).conversations()
    ]
    conversations.sort(key=lambda turns: (turns[0].sent_s, turns[0].rid))
    return tuple(chain.from_iterable(conversations))


def deal_rates(rates: tuple[ReadRate, ...], count: int) -> tuple[float, ...]:
    """`count` read rates in the proportion of their weights, largest remainder first, in the order given.

    Dealt and not drawn: a seed that draws many fast readers would ask for more than the engine makes, another regime.
    """
    total = sum(rate.weight for rate in rates)
    shares = [rate.weight * count // total for rate in rates]
    by_remainder = sorted(range(len(rates)), key=lambda index: -(rates[index].weight * count % total))
    for index in by_remainder[: count - sum(shares)]:
        shares[index] += 1
    return tuple(rate.tok_s for rate, share in zip(rates, shares, strict=True) for _ in range(share))


class _GroupDraw:
    """One group's draws from one generator, in an order that published results depend on."""

    def __init__(self, scenario_name: str, group: Group, *, seed: int, factor: float) -> None:
        # A text seed is the same on every platform; with one generator for all, a group more would change the others.
        self._rnd = random.Random(f"{scenario_name}/{group.name}/{seed}")
        self._group = group
        self._prefix = f"s{seed}-{group.name}"
        self._factor = factor

    def conversations(self) -> Iterator[tuple[Request, ...]]:
        times = arrival_times(self._group, self._rnd)
        rates = list(deal_rates(self._group.read_rates, len(times)))
        self._rnd.shuffle(rates)
        shared = self._shared_prompts()
        weights = list(accumulate(1 / rank for rank in range(1, len(shared) + 1)))
        # Fixed width: a rid that is a prefix of another one is aborted with it by upstream.
        width = max(3, len(str(len(times) - 1)))
        for index, (sent_s, rate) in enumerate(zip(times, rates, strict=True)):
            start = tuple(self._rnd.choices(shared, cum_weights=weights)) if shared else ()
            yield tuple(self._turns(index, f"{self._prefix}-{index:0{width}d}", sent_s, rate, start))

    def _shared_prompts(self) -> list[Segment]:
        session = self._group.session
        if session is None or session.shared_tokens is None:
            return []
        return [
            Segment(f"shared:{self._prefix}-{rank}", self._rnd.randint(*session.shared_tokens))
            for rank in range(1, session.shared_prefixes + 1)
        ]

    def _turns(
        self, index: int, name: str, sent_s: float, rate: float, start: tuple[Segment, ...]
    ) -> Iterator[Request]:
        session = self._group.session
        most = session.turns[1] if session else 1
        turns = self._rnd.randint(*session.turns) if session else 1
        # Every turn of such a group is numbered, the only one of a conversation too: see the width above.
        width = len(str(most))
        rids = [f"{name}t{turn:0{width}d}" if most > 1 else name for turn in range(1, turns + 1)]
        history, before = start, None
        for rid in rids:
            question, answer = self._lengths(index, rid)
            think_s = 0.0
            if session and before is not None and session.think_s:
                think_s = self._rnd.expovariate(1 / session.think_s)
            history = (*history, question)
            yield Request(
                rid=rid,
                group=self._group.name,
                sent_s=sent_s if before is None else 0.0,
                segments=history,
                answer_tokens=answer,
                max_tokens=self._group.max_tokens or math.ceil(answer * self._factor),
                read_rate_tok_s=rate,
                # A rate without end among readers is a program: it has no buffer that can run dry.
                reader="agent" if math.isinf(rate) and self._group.reader == "reader" else self._group.reader,
                after=before,
                think_s=think_s,
            )
            history, before = (*history, Segment(f"out:{rid}", answer)), rid

    def _lengths(self, index: int, rid: str) -> tuple[Segment, int]:
        """(own part of the prompt, length of the answer)."""
        group, key = self._group, f"in:{rid}"
        if group.trace is not None:
            row = group.trace.rows[index]
            return Segment(key, row.prompt_tokens), row.output_tokens
        assert group.prompt_tokens is not None and group.answer_tokens is not None, group
        tokens = draw_tokens(group.prompt_tokens, self._rnd)
        question = Segment(key, tokens)
        if _ids_first(group):
            question = Segment.of(key, (self._rnd.randrange(PROMPT_ID_LOW, PROMPT_ID_HIGH) for _ in range(tokens)))
        return question, draw_tokens(group.answer_tokens, self._rnd)


def _ids_first(group: Group) -> bool:
    """Whether prompt ids come from the group's own generator, before the answer's length.

    So they did when there were ranges and counts only; published results hold the requests that this order gives.
    """
    ranges = isinstance(group.prompt_tokens, tuple) and isinstance(group.answer_tokens, tuple)
    return ranges and group.count is not None and group.session is None
