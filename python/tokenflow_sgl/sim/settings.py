"""What the simulated engine is started with: sizes, how it batches, what its host tier does.

Owns validation of none of it: scenarios and rivals are checked where they are made. Invariant: two engines with equal
settings and policies make the same run.
"""

from __future__ import annotations

from dataclasses import dataclass

BATCHINGS = ("prefill_first", "mixed", "mixed_chunk")
COPIES = ("ahead", "at_park", "none")
LOADS = ("ahead", "at_admission")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """batching: `prefill_first` runs prompts alone, as SGLang does; `mixed` lets streams decode in the same step;
    `mixed_chunk` does so as SGLang's --enable-mixed-chunk: who decoded beside a prompt cannot be parked right after.

    copies: when KV goes to the host: `ahead` as soon as it is in the tree, `at_park`, or `none` (no host tier).
    loads: `ahead` of admission, asked for by the policy, or `at_admission`, whose forward waits for it.
    host_reserve: whether a part of the host pool is kept free, as by the shipped host tier (adapter/kv.py).
    inserts: whether a publish is an insert in a radix tree, which takes the engine's thread.
    conservativeness: SGLang's --schedule-conservativeness, a factor on the future that its own admission reserves.
    """

    pool_tokens: int
    page_tokens: int
    chunk_tokens: int
    max_running: int
    host_tokens: int
    batching: str = "prefill_first"
    copies: str = "ahead"
    loads: str = "ahead"
    conservativeness: float = 1.0
    inserts: bool = True
    host_reserve: bool = False
    load_slots: int = 3

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("batching", self.batching, BATCHINGS),
            ("copies", self.copies, COPIES),
            ("loads", self.loads, LOADS),
        ):
            if value not in valid:
                raise ValueError(f"{name}={value!r}: valid are {', '.join(valid)}")
        if self.pool_tokens < self.page_tokens:
            raise ValueError(f"pool_tokens={self.pool_tokens}: valid is at least a page ({self.page_tokens})")

    def can_serve(self, *, prompt_tokens: int, answer_tokens: int) -> bool:
        """Whether the pool holds the request with nobody else there: one page stays free for the next token."""
        return can_serve(prompt_tokens + answer_tokens, pool_tokens=self.pool_tokens, page_tokens=self.page_tokens)


def can_serve(tokens: int, *, pool_tokens: int, page_tokens: int) -> bool:
    """Whether a request of so many tokens, prompt and answer, is served at all; every server has the same limit."""
    return tokens + page_tokens <= pool_tokens // page_tokens * page_tokens
