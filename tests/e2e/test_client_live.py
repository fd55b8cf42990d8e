"""The Python client on a live server: what it shows is the answer, and what it reports is what its user took."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dill
import openai
import pytest

from support.live import Server, until
from tokenflow_sgl.client import AsyncClient, Client, RequestRefused, Stream, paced

pytestmark = pytest.mark.e2e
DOCS = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
SAID: Any = [{"role": "user", "content": "a reader waits"}]
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


# A logit processor that changes nothing: an answer at some 80 tokens a second, far above its readers, is still being
# generated while a test looks at it. Made here, else dill would send a name, and the server cannot import a test.
_SLOWLY: dict[str, Any] = {"__name__": "__main__"}
exec(
    """class Slowly:
    def __call__(self, logits, params=None):
        import time
        time.sleep(0.012)
        return logits
""",
    _SLOWLY,
)
SLOWLY = json.dumps({"callable": dill.dumps(_SLOWLY["Slowly"]).hex()})
SLOW = {**GREEDY, "max_tokens": 1500, "custom_logit_processor": SLOWLY}


@pytest.fixture(params=["http", "websocket"])
def transport(request: pytest.FixtureRequest, server: Server) -> str:
    if request.param == "websocket" and server.http.get("/tokenflow/config").json().get("websocket") is not True:
        pytest.skip('GET /tokenflow/config does not show "websocket": true: this server has no /tokenflow/stream')
    return str(request.param)


@pytest.fixture
def client(server: Server, transport: str) -> Iterator[Client]:
    with Client(server.url, transport=transport) as made:
        yield made


def unpaced(server: Server, **more: Any) -> list[str]:
    """The answers of one request that is not streamed, by index."""
    reply = server.http.post("/v1/chat/completions", json={"messages": SAID, **GREEDY, **more})
    assert reply.status_code == 200, reply.text
    return [choice["message"]["content"] for choice in sorted(reply.json()["choices"], key=lambda c: c["index"])]


class Reader(threading.Thread):
    """Takes pieces as a user's loop does, until it is told to stop taking them. `tokens`: what it has taken."""

    def __init__(self, stream: Stream[Any]) -> None:
        super().__init__(daemon=True)
        self.stream, self.tokens, self.goes_on = stream, 0, threading.Event()
        self.goes_on.set()
        self.start()

    def run(self) -> None:
        for piece in self.stream:
            self.tokens = piece.chunk["usage"]["completion_tokens"]
            self.goes_on.wait()


def row_of(server: Server, stream: Stream[Any]) -> dict[str, Any]:
    until(lambda: stream.id, "the id of the stream")
    assert stream.id is not None
    row: dict[str, Any] = server.row(stream.id, lambda r: r["consumed_tokens"] is not None)
    return row


def reports(server: Server) -> int:
    accepted: int = server.http.get("/tokenflow/config").json()["http"]["acks"]["accepted"]
    return accepted


def test_a_paced_answer_is_the_unpaced_one(server: Server, client: Client) -> None:
    with client.chat(SAID, read_rate=60, **GREEDY) as stream:
        assert "".join(stream) == unpaced(server)[0]
    assert stream.usage is not None and stream.usage["completion_tokens"] == 60
    assert stream.finish_reason == "length" and stream.received_tokens == {0: 60}


def test_a_paced_completion_is_the_unpaced_one(server: Server, client: Client) -> None:
    whole = server.http.post("/v1/completions", json={"prompt": "a reader", **GREEDY}).json()["choices"][0]["text"]
    with client.complete("a reader", read_rate=60, **GREEDY) as stream:
        assert "".join(stream) == whole


def test_paced_answers_of_asyncio_are_the_unpaced_ones(server: Server, transport: str) -> None:
    async def read(client: AsyncClient) -> str:
        async with client.chat(SAID, read_rate=60, **GREEDY) as stream:
            return "".join([piece async for piece in stream])

    async def read_three() -> list[str]:
        async with AsyncClient(server.url, transport=transport) as client:
            return await asyncio.gather(*(read(client) for _ in range(3)))

    assert asyncio.run(read_three()) == unpaced(server) * 3


def openai_arguments() -> dict[str, Any]:
    asked = {name: value for name, value in GREEDY.items() if name != "ignore_eos"}
    return {**asked, "extra_body": {"ignore_eos": True}, "stream": True}


def test_around_the_openai_package_the_chunks_are_its_own_and_the_text_the_same(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as theirs:
        client = paced(theirs, read_rate=60)
        before = reports(server)
        with client.chat.completions.create(messages=SAID, **openai_arguments()) as stream:
            chunks = list(stream)
        assert {type(chunk) for chunk in chunks} == {openai.types.chat.ChatCompletionChunk}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == unpaced(server)[0]
        assert stream.response.headers["x-tokenflow-request-id"] == stream.id
        assert reports(server) > before
        whole = client.chat.completions.create(messages=SAID, **{**openai_arguments(), "stream": False})
        assert whole.choices[0].message.content == unpaced(server)[0]
        assert client.models.list().data


def test_around_the_asynchronous_openai_package_too(server: Server) -> None:
    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as theirs:
            stream = await paced(theirs, read_rate=60).completions.create(prompt="a reader", **openai_arguments())
            return "".join([chunk.choices[0].text async for chunk in stream])

    whole = server.http.post("/v1/completions", json={"prompt": "a reader", **GREEDY}).json()["choices"][0]["text"]
    assert asyncio.run(read()) == whole


def test_each_of_two_choices_is_read_and_reported_on_by_itself(server: Server, client: Client) -> None:
    texts = {0: "", 1: ""}
    with client.chat(SAID, read_rate=60, n=2, **GREEDY) as stream:
        for piece in stream:
            texts[piece.choice] += piece
    assert [texts[0], texts[1]] == unpaced(server, n=2)
    assert stream.finish_reasons == {0: "length", 1: "length"}
    stream = client.chat(SAID, read_rate=20, n=2, **{**SLOW, "max_tokens": 600})
    Reader(stream)

    def both_reported() -> bool:
        rows = server.state()["streams"]
        return len(rows) == 2 and all((row["consumed_tokens"] or 0) > 15 for row in rows)

    until(both_reported, "two choices that are read")
    stream.cancel()


def test_the_server_follows_the_reader_and_learns_that_it_reads_twice_as_fast(server: Server, client: Client) -> None:
    stream = client.chat(SAID, read_rate=10, **SLOW)
    reader = Reader(stream)
    taken = until(lambda: reader.tokens > 10 and reader.tokens, "a reader at work")
    row = server.row(row_of(server, stream)["id"], lambda r: r["consumed_tokens"] >= taken)
    # Between two reports the server reckons on: by a second of reading at most.
    assert row["consumed_tokens"] <= reader.tokens + 10 * 2
    stalls_before = stream.stalls.count
    stream.read_rate = 20
    before = reader.tokens
    until(lambda: reader.tokens >= before + 30, "three reports at the new rate")
    server.row(row["id"], lambda r: r["read_rate_tok_s"] > 15)
    assert stream.stalls.count == stalls_before
    stream.cancel()


def test_a_reader_whom_the_model_outruns_never_stalls_after_its_third_report(server: Server, client: Client) -> None:
    told: list[float] = []
    stream = client.chat(SAID, read_rate=10, on_stall=told.append, **SLOW)
    reader = Reader(stream)
    until(lambda: reader.tokens >= 15, "three reports")  # at 1, 6 and 11 tokens
    told.clear()
    stream.read_rate = 20
    until(lambda: reader.tokens >= 80, "a reader that read on")
    assert told == []
    stream.cancel()


def test_a_loop_that_stops_taking_pieces_is_seen_to_have_stopped(server: Server, client: Client) -> None:
    stream = client.chat(SAID, read_rate=10, **SLOW)
    reader = Reader(stream)
    until(lambda: reader.tokens >= 15, "three reports")
    reader.goes_on.clear()
    rid = row_of(server, stream)["id"]

    def stands_still() -> Any:
        first = row_of(server, stream)
        later = server.row(rid, lambda r: r["generated_tokens"] >= first["generated_tokens"] + 40)
        return (first, later) if later["consumed_tokens"] == first["consumed_tokens"] else None

    first, later = until(stands_still, "a reader taken to have stopped")
    assert later["slack_s"] > first["slack_s"] and later["consumed_tokens"] < later["generated_tokens"]
    told = reports(server)
    server.row(rid, lambda r: r["generated_tokens"] >= later["generated_tokens"] + 60)
    assert reports(server) == told, "silence is what tells that a reader stopped"
    reader.goes_on.set()
    until(lambda: row_of(server, stream)["consumed_tokens"] > later["consumed_tokens"], "a reader that came back")
    stream.cancel()


def test_a_cancelled_stream_is_forgotten_at_once(server: Server, client: Client) -> None:
    stream = client.chat(SAID, read_rate=10, **SLOW)
    assert next(stream) is not None
    row = row_of(server, stream)
    stream.cancel()
    assert list(stream) == [] and stream.finish_reason is None
    until(lambda: row["id"] not in [r["id"] for r in server.state()["streams"]], "a stream that is gone")
    server.settle()


def test_a_cancelled_stream_of_asyncio_or_the_openai_package_is_forgotten_too(server: Server, transport: str) -> None:
    async def leave() -> None:
        async with AsyncClient(server.url, transport=transport) as client, client.chat(SAID, **SLOW) as stream:
            await anext(stream)

    asyncio.run(leave())
    server.settle()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as theirs:
        stream = paced(theirs).chat.completions.create(messages=SAID, **openai_arguments() | {"max_tokens": 1500})
        next(stream)
        stream.close()
    server.settle()


def test_a_program_reads_as_fast_as_it_can_and_reports_nothing(server: Server, client: Client) -> None:
    before = reports(server)
    with client.chat(SAID, read_rate=math.inf, **GREEDY) as stream:
        assert "".join(stream) == unpaced(server)[0]
    assert reports(server) == before


def test_a_rate_that_the_server_does_not_take_is_refused_with_its_error(client: Client) -> None:
    with pytest.raises(RequestRefused, match=r"400: tokenflow\.read_rate: 5000") as refused:
        client.chat(SAID, read_rate=5000, **GREEDY)
    assert refused.value.status == 400 and refused.value.error["param"] == "tokenflow.read_rate"


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_docs_run(server: Server, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = EXAMPLES[number]
    assert "http://localhost:30000" in code and len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code.replace("http://localhost:30000", server.url), f"{DOCS}[{number}]", "exec"), {})
    assert capsys.readouterr().out


def test_who_reads_at_half_the_declared_rate_is_parked_before_who_reads_as_declared(
    server: Server, client: Client
) -> None:
    slow = {**SLOW, "max_tokens": 500}
    with client.chat(SAID, read_rate=8, **slow) as half, client.chat(SAID, read_rate=8, **slow) as steady:
        readers = [Reader(half), Reader(steady)]
        half.read_rate = 4
        until(lambda: row_of(server, half)["read_rate_tok_s"] < 6, "half the rate")
        assert server.row(steady.id or "", lambda r: r["generated_tokens"] > 250)["read_rate_tok_s"] > 6
        seq = server.state()["seq"]
        prompts = [f"number {i} comes with much to read. " * 20 for i in range(10)]
        crowd = [server.stream(prompt, 40, tokenflow={"read_rate": 60}) for prompt in prompts]

        def parked() -> list[str]:
            told = server.state(seq)["transitions"]
            return [t["id"] for t in told if t["what"] == "park" and t["id"] in (half.id, steady.id)]

        assert until(parked, "a park of one of the two")[0] == half.id
        for stream in crowd:
            stream.wait_end()
        half.read_rate = steady.read_rate = 1000.0
        for reader in readers:
            reader.join(60)
        assert half.received_tokens == steady.received_tokens == {0: 500}
