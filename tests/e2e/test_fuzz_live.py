"""Five hundred hostile messages at a live server; scripts/fuzz sends thousands, and calls from the routes' schema."""

from __future__ import annotations

from typing import Any

import pytest

from support.bystanders import trial, troubles
from support.live import Server

OURS = """\
[12:00:00] ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "/x/uvicorn/protocols/websockets/websockets_sansio_impl.py", line 1, in run_asgi
  File "/x/tokenflow_sgl/adapter/websocket.py", line 2, in _handle
UnicodeDecodeError: no
"""
UVICORNS = """\
[12:00:00] ERROR:    Invalid UTF-8 sequence received from client.
Traceback (most recent call last):
  File "/x/uvicorn/protocols/websockets/websockets_sansio_impl.py", line 1, in send_receive_event_to_app
UnicodeDecodeError: no
"""


@pytest.mark.e2e
def test_hostile_messages_break_nothing_and_nobody_else_feels_them(server: Server) -> None:
    fuzz, beside, wrong = trial(server, 3, 500, every=125)
    print(dict(fuzz.sent), dict(fuzz.answers), dict(beside.rounds))
    assert not wrong, "\n".join(wrong)
    assert {"text", "fragments", "misframed", "no UTF-8", "reset", "half a frame", "http"} <= set(fuzz.sent)
    assert {"chunk", "error 400", "http 200", "http 400"} <= set(fuzz.answers)
    assert min(beside.rounds.values()) > 1 and beside.accepted > 0


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": [-1]}),
        ("/v1/completions", {"model": "tiny", "prompt": [[5], [10**6]]}),
        ("/generate", {"input_ids": [5, 10**6]}),
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused_and_the_scheduler_lives(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400 and "token ids from 0 to" in reply.json()["error"]["message"]
    assert server.generate("still there", 2)["text"]


def test_a_failure_in_the_log_is_seen_and_what_uvicorn_says_of_broken_text_is_none() -> None:
    assert len(troubles(OURS)) == 2 and not troubles(UVICORNS)
    assert troubles("[12:00:00] Scheduler hit an exception: Trace\n")
    assert not troubles('INFO: 127.0.0.1:1 - "POST /tokenflow/ack HTTP/1.1" 400 Bad Request\n')
