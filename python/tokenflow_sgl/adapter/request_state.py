"""What the adapter remembers of one request, on the request itself: `req.tokenflow`.

Owns the reading of custom_params and the rule of who may be parked; owns no buffer. Invariant: every field is the
same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.types import Arrived, ReaderClass
from . import rates


@dataclass(slots=True)
class RequestState:
    reader: ReaderClass
    read_rate_tok_s: float | None
    withheld: bool
    parkable: bool  # as far as the request's own features decide
    parent: str | None = None  # the id its client knows, where upstream made one of its own
    arrived: bool = False
    gone: bool = False
    admitted: bool = False  # holds, or held since it last waited, memory of its own
    parks: int = 0
    probe_ct: int = -1  # forward count of the last look into the tree, and what was found
    cached_tokens: int = 0
    host_hit_tokens: int = 0
    takes_tokens: int = 0
    recompute: bool = False  # what it has on the host failed or came too late: not loaded before it came in
    backed_tokens: int = 0  # of what it published since it last came in, on the host
    backed_node: Any = None  # the tree's node where that ends
    frees_key: tuple[Any, ...] | None = None
    frees_tokens: int = 0

    @classmethod
    def of(cls, req: Any, default_rate_tok_s: float) -> RequestState:
        said = rates.from_custom_params(
            req.sampling_params.custom_params, stream=req.stream, default_rate_tok_s=default_rate_tok_s
        )
        reader = ReaderClass(said.reader)
        rate = said.rate_tok_s if reader is ReaderClass.READER else None
        withheld = said.withheld and reader is ReaderClass.READER and bool(req.require_reasoning)
        # Upstream warms the cache for n > 1 with a request of no tokens: it is none of the choices.
        is_choice = req.stream and int(req.sampling_params.max_new_tokens or 0) > 0
        parent = rates.parent_of(req.sampling_params.custom_params) if is_choice else None
        return cls(reader, rate, withheld, _parkable(req), parent)

    def arrival(self, req: Any) -> Arrived:
        return Arrived(
            rid=req.rid,
            prompt_tokens=len(req.origin_input_ids),
            max_output_tokens=int(req.sampling_params.max_new_tokens),
            reader=self.reader,
            read_rate_tok_s=self.read_rate_tok_s,
            withheld=self.withheld,
        )


def _parkable(req: Any) -> bool:
    """False for what upstream's retraction loses or computes again at full length.

    Embeddings as input: the output would be thrown away. Hidden states, routed experts, indexer top-k, sampling masks:
    reset by retraction. Beam groups and sessions: their rows are not the request's own. Pictures: untested.
    """
    return not (
        req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.return_hidden_states
        or req.return_routed_experts
        or req.return_indexer_topk
        or req.return_sampling_mask
        or req.session is not None
        or req.multimodal_inputs is not None
    )


def parkable_now(req: Any) -> bool:
    """Whether parking `req`, a member of the running batch, is safe in this step."""
    if req.finished_reason is not None or req.to_finish is not None or req.is_retracted or not req.kv.holds_kv:
        return False
    if req.beam_group is not None or req.skip_radix_cache_insert or req.multimodal_inputs is not None:
        return False
    # Logprobs of the prompt would be computed again from their start, and those already collected are cleared.
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids):
        return False
    # The token in flight would end it: its dropped result would only be computed again.
    return not req.next_output_finishes_by_length()
