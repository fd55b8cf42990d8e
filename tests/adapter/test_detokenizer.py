"""Answers in pieces of characters: what a client is sent, joined, is the answer (field report B29)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import detokenizer_manager
from transformers import AutoTokenizer

from support.live import MODEL
from tokenflow_sgl.adapter.detokenizer import SentOnce
from tokenflow_sgl.bench.models import ensure_model

# Emoji with joiners, flags and skin tones, CJK, combining marks, right to left, and plain words between them.
ALPHABET = [
    *"ab .,\n",
    "\U0001f469\u200d\U0001f680",
    "\U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd",
    "\u4e2d",
    "\u6587",
]
ALPHABET += ["e\u0301", "\u05e9\u05dc", "\U0001f600", "\u00e9", "word ", "\u65e5\u672c", "\u20ac"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    ensure_model("tiny", MODEL)
    return AutoTokenizer.from_pretrained(MODEL)


def pieces(tokenizer: Any, status: type, ids: Sequence[int], sizes: Iterator[int]) -> list[str]:
    """What upstream's own detokenizer sends for an answer that comes in steps of so many tokens."""
    manager = object.__new__(detokenizer_manager.DetokenizerManager)
    vars(manager).update(
        decode_status={}, tokenizer=tokenizer, vocab_size=len(tokenizer), disable_tokenizer_batch_decode=False,
        is_tool_call_parser_gpt_oss=False,
    )  # fmt: skip
    sent, at = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer_manager, "DecodeStatus", status)
        while at < len(ids):
            step = list(ids[at : at + next(sizes)])
            at += len(step)
            output = SimpleNamespace(
                rids=["a"], decoded_texts=[""], decode_ids=[step], read_offsets=[0], skip_special_tokens=[True],
                spaces_between_special_tokens=[True], no_stop_trim=[False],
                finished_reasons=[{"type": "length", "length": at} if at == len(ids) else None],
            )  # fmt: skip
            sent += manager._decode_batch_token_id_output(output)
    return sent


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    """One token for each byte: every character that is longer comes in pieces."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(names[byte]) for byte in data]


def steps(random_: random.Random | None) -> Iterator[int]:
    while True:
        yield 1 if random_ is None else random_.randint(1, 7)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_sent_of_any_text_is_the_text_and_no_piece_comes_twice(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    data = "".join(rng.choice(ALPHABET) for _ in range(60)).encode()
    if seed % 4 == 3:  # broken in places
        data = b"".join(data[i : i + 5] + bytes([rng.choice((0x80, 0xE4, 0xF0))]) for i in range(0, len(data), 5))
    ids = byte_ids(tokenizer, data)
    sent = pieces(tokenizer, SentOnce, ids, steps(None if seed % 2 else rng))
    assert "".join(sent) == tokenizer.decode(ids, skip_special_tokens=True)


def test_upstream_sends_a_character_twice_so_this_is_still_needed(tokenizer: Any) -> None:
    """When it does not any more, adapter/detokenizer.py can go."""
    ids = byte_ids(tokenizer, "\u4e2d".encode() + b"\xe4\xf0a")  # a character, two that never end, a letter
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    stock = pieces(tokenizer, detokenizer_manager.DecodeStatus, ids, iter((4, 1, 1)))
    assert "".join(stock) == "\u4e2d" + answer
    assert "".join(pieces(tokenizer, SentOnce, ids, iter((4, 1, 1)))) == answer
