"""What a client makes of chunks: pieces, counts, reasons, and how a stream ended."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tokenflow_sgl.client.answer import Answer, Piece, piece_of
from tokenflow_sgl.client.errors import Cut, StreamBroken, StreamError
from tokenflow_sgl.client.events import EventSplitter


def chat(text: str = "", total: int | None = None, *, index: int = 0, reason: str | None = None, **more: Any) -> Any:
    choice = {"index": index, "delta": {"content": text, **more}, "finish_reason": reason}
    usage = None if total is None else {"completion_tokens": total}
    return {"id": "rid", "choices": [choice], "usage": usage}


def heard(*chunks: Any) -> Answer[Piece]:
    answer = Answer(math.inf, piece_of)
    for chunk in chunks:
        answer.hear(chunk, 0.0)
    return answer


def pieces(answer: Answer[Piece]) -> list[Piece]:
    return [shown.item for shown in iter(lambda: answer.show(0.0, 0.0), None)]


def test_pieces_are_the_text_and_tokens_are_what_the_server_counts() -> None:
    usage = {"id": "rid", "choices": [], "usage": {"completion_tokens": 9}}
    answer = heard(chat(role="assistant"), chat("Hel", 3), chat("lo", 8), chat(reason="stop"), usage)
    assert answer.schedule.received_tokens == {0: 8}
    assert pieces(answer) == ["Hel", "lo"]
    assert (answer.id, answer.finish_reasons, answer.usage) == ("rid", {0: "stop"}, {"completion_tokens": 9})


def test_without_usage_a_chunk_with_content_is_one_token() -> None:
    answer = heard(chat(role="assistant"), chat("Hel"), chat("lo"), chat(reason="stop"))
    assert answer.schedule.received_tokens == {0: 2}


def test_a_completions_text_stands_beside_its_index() -> None:
    answer = heard({"id": "c", "choices": [{"index": 1, "text": "hi", "finish_reason": None}]})
    (piece,) = pieces(answer)
    assert (piece, piece.choice) == ("hi", 1)


def test_thinking_is_a_piece_without_text_that_takes_its_time() -> None:
    answer = heard(chat(total=4, reasoning_content="hm"), chat("so", 6))
    thought, said = pieces(answer)
    assert (thought, thought.reasoning, said) == ("", "hm", "so")
    assert "".join([thought, said]) == "so"


def test_a_tool_call_is_a_piece_that_carries_its_chunk() -> None:
    call = chat(total=2, tool_calls=[{"index": 0, "function": {"name": "f"}}])
    (piece,) = pieces(heard(call))
    assert piece == "" and piece.chunk is call


def test_an_error_event_is_raised_with_the_servers_error_after_what_came_before_it() -> None:
    answer = heard(chat("before", 1))
    error = {"message": "out of memory", "type": "InternalServerError", "code": 500}
    with pytest.raises(StreamError, match="out of memory") as raised:
        answer.hear({"error": error}, 0.0)
    answer.end(raised.value)
    assert answer.wait_s(0.0) == 0.0 and pieces(answer) == ["before"]
    assert answer.wait_s(0.0) is None
    with pytest.raises(StreamError) as again:
        answer.raise_error()
    assert again.value.error == error
    answer.raise_error()


def test_a_stream_that_broke_names_what_had_come() -> None:
    answer = heard(chat("a", 7), chat("b", 2, index=1))
    answer.end(Cut("the connection ended without [DONE]"))
    with pytest.raises(
        StreamBroken, match=r"rid broke: .*\[DONE\]; received: 7 tokens of choice 0, 2 tokens of choice 1"
    ):
        answer.raise_error()


def test_a_cancelled_stream_shows_nothing_more_and_raises_nothing() -> None:
    answer = heard(chat("a", 1))
    answer.cancel()
    answer.raise_error()
    assert answer.wait_s(0.0) is None


@pytest.mark.parametrize("chunk", [5, "x", [], {"choices": [{"index": 0}, {"index": 1}]}])
def test_what_is_no_chunk_is_a_broken_stream(chunk: Any) -> None:
    with pytest.raises(Cut):
        heard(chunk)


def test_an_answer_is_complete_once_every_choice_has_its_reason() -> None:
    one = heard(chat("a", 1, reason="stop"), chat("b", 1, index=1))
    assert not one.complete
    one.hear(chat(index=1, reason="length"), 0.0)
    assert one.complete and not heard().complete


def test_each_stall_is_told_to_who_asked_for_it() -> None:
    told: list[float] = []
    answer = Answer(8.0, piece_of, on_stall=told.append)
    for total, at_s in ((1, 0.0), (2, 2.0)):
        answer.hear(chat("x", total), at_s)
        answer.show(0.0, at_s)
    assert told == [1.875]  # due at 0.125


def test_an_event_is_cut_at_line_feeds_only() -> None:
    """JSON may hold U+2028 and U+0085 as they are; comments come while a stream is parked."""
    splitter = EventSplitter()
    data = 'data: {"text": "a\u2028b\u0085c"}\n\n'.encode()
    assert splitter.feed(b": still here\n\n" + data[:20]) == []
    assert splitter.feed(data[20:] + b"data: [DONE]\r\n\r\n") == ['{"text": "a\u2028b\u0085c"}'.encode(), b"[DONE]"]
