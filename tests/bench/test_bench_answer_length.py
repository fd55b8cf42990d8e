"""Answers end at the length that travels with the request, by absolute position."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from tokenflow_sgl.bench.answer_length import AnswerLength, request_fields

EOS, VOCABULARY, PROMPT = 2, 8, 5


def row(committed, answer_tokens=3):
    """What SGLang hands over for a request whose KV has `committed` tokens when the next token is sampled."""
    req = SimpleNamespace(
        kv=SimpleNamespace(kv_committed_len=committed),
        origin_input_ids=[0] * PROMPT,
        eos_token_ids={EOS},
        tokenizer=None,
    )
    return {"answer_tokens": answer_tokens, "__req__": req}


def sampled(*rows):
    """The token each row would sample; every row likes EOS best."""
    logits = np.zeros((len(rows), VOCABULARY))
    logits[:, EOS] = 5.0
    logits[:, 3] = 1.0
    return AnswerLength()(logits, rows).argmax(axis=1).tolist()


def test_eos_comes_as_token_number_three_of_three_and_not_before():
    # The forward over the prompt makes token 1: its KV is the prompt's.
    assert [sampled(row(PROMPT + i))[0] for i in range(5)] == [3, 3, EOS, EOS, EOS]


def test_a_request_that_was_parked_and_computed_again_ends_at_the_same_token():
    # Its KV is committed again token for token; what it was batched with does not count.
    assert sampled(row(PROMPT), row(PROMPT + 2), row(PROMPT + 1)) == [3, EOS, 3]


@pytest.mark.parametrize("other", [None, {}, {"answer_tokens": 3}, row(PROMPT, 0), row(PROMPT, "3"), row(PROMPT, True)])
def test_a_row_that_names_no_length_is_left_alone(other):
    assert sampled(other) == [EOS]
    assert sampled(other, row(PROMPT)) == [EOS, 3]


def test_the_fields_of_a_request_name_the_class_and_the_length():
    fields = request_fields(40)
    assert fields["custom_params"] == {"answer_tokens": 40}
    named = pickle.loads(bytes.fromhex(json.loads(fields["custom_logit_processor"])["callable"]))
    assert named is AnswerLength


@pytest.mark.parametrize("bad", [0, -1, 1.5, "3", True, None])
def test_a_length_that_is_no_whole_number_of_at_least_one_is_refused(bad):
    with pytest.raises(ValueError, match=f"answer_tokens={bad!r}"):
        request_fields(bad)
