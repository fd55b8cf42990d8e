"""Answers that end by themselves at a length that travels with the request.

Owns the logit processor that masks EOS before token number L and forces it at L, and the request fields that ask for
it. Does not own max_tokens, which a client still sets as it likes. Invariant: the decision depends only on a request's
absolute position, so a stream that was retracted, parked or batched differently ends at the same token. No SGLang and
no torch here: a load generator imports this module too.

A server needs --enable-custom-logit-processor and this package; that flag runs code which clients send, so it belongs
on a bench, not on the open network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PARAM = "answer_tokens"


def request_fields(answer_tokens: int) -> dict[str, Any]:
    """Fields of a request whose answer has answer_tokens tokens, the closing EOS among them.

    For /v1/chat/completions and /v1/completions both are top-level fields of the body; for /generate custom_params
    belongs inside sampling_params. Leave ignore_eos unset, else the forced EOS ends nothing; a smaller max_tokens cuts
    the answer. Raises ValueError if answer_tokens is not a whole number of at least 1.
    """
    if isinstance(answer_tokens, bool) or not isinstance(answer_tokens, int) or answer_tokens < 1:
        raise ValueError(f"answer_tokens={answer_tokens!r}: a whole number of at least 1 is needed")
    # A pickle that holds only the class's name: dill would send its code, a few kB with every request.
    name = f"c{AnswerLength.__module__}\n{AnswerLength.__qualname__}\n.".encode()
    return {"custom_logit_processor": json.dumps({"callable": name.hex()}), "custom_params": {PARAM: answer_tokens}}


def tokens_after_this(params: dict[str, Any] | None) -> int | None:
    """Tokens still to come after the one being sampled: 0 = it is the last, negative = the answer has ended.

    None for a request that names no length. Counts by KV, not by output_ids: in the overlap loop the newest token is
    not in output_ids yet when its successor is sampled, while kv_committed_len moves when the forward is prepared. It
    is then the number of positions this forward completes, so the sampled token has number committed - prompt + 1
    (below 1 in a chunk that is not the prompt's last, whose sample nobody sees).

        position   0 .. P-1 | P    P+1  ..        P = prompt tokens
        token no.           | 1    2    ..        sampled from the forward that ends at position P-1, P, ..
        committed then      | P    P+1  ..
    """
    if params is None or type(params.get(PARAM)) is not int or params[PARAM] < 1 or "__req__" not in params:
        return None  # A client sent nonsense: raising here would end the scheduler.
    req = params["__req__"]
    number: int = req.kv.kv_committed_len - len(req.origin_input_ids) + 1
    return int(params[PARAM]) - number


def eos_tokens(req: Any) -> list[int]:
    """Every token id at which SGLang ends this request of its own accord."""
    ids = set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids.add(req.tokenizer.eos_token_id)
        ids.update(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
    ids.discard(None)
    return sorted(ids)


class AnswerLength:
    """Logit processor in SGLang's sense: called once a step with the rows of all requests that carry it."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: Sequence[dict[str, Any] | None] | None = None
    ) -> torch.Tensor:
        """Edit logits [rows, vocabulary] in place; custom_param_list has one entry per row."""
        params = custom_param_list or ()
        after = [tokens_after_this(row_params) for row_params in params]
        marked = [row for row, left in enumerate(after) if left is not None]
        if not marked:
            return logits
        eos = eos_tokens(params[marked[0]]["__req__"])  # type: ignore[index]
        minus_inf = float("-inf")
        if len(marked) == len(after):
            for token in eos:
                logits[:, token] = minus_inf
        else:
            for token in eos:
                logits[marked, token] = minus_inf
        for row in marked:
            if after[row] <= 0:  # type: ignore[operator]
                logits[row] = minus_inf
                logits[row, eos[0]] = 0.0
        return logits
