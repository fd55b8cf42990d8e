"""The page and its reader against a real server: what they show and report is what the server does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import chromium, in_thread, seen, watched
from support.live import LiveStream, Server, read_together, until
from tokenflow_sgl.dashboard.app import Target, make_app

pytestmark = pytest.mark.e2e
DOCS = Path(__file__).parents[2] / "docs"
CHAT = "**/v1/chat/completions"
TOKENS = 400
# Made by the page, as one of an application would be; the text of all of it is greedy and does not end by itself.
START = """async ({transport, readRate, tokens, question}) => {
  const { stream } = await import("/tokenflow.js");
  const body = { model: "tiny", messages: [{ role: "user", content: question }], max_tokens: tokens, temperature: 0,
    ignore_eos: true };
  window.out = { text: "", pieces: 0, tokens: 0, stalls: [], end: null };
  const onStall = (stall) => out.stalls.push(stall);
  window.reader = stream({ url: "", body, readRate, transport, onStall });
  (async () => {
    try {
      for await (const piece of reader) { out.text += piece.text; out.pieces += 1; out.tokens += piece.tokens; }
      out.end = reader.over.why;
    } catch (error) { out.end = String(error); }
  })();
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with in_thread(make_app(Target(server.url))) as dash:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        wrong = watched(page)
        page.goto(dash)
        seen(page, "document.getElementById('about').textContent.includes('policy')")
        yield page
        page.close()
    assert wrong == []


@pytest.fixture(params=["sse", "websocket"])
def transport(request: pytest.FixtureRequest, server: Server) -> str:
    if request.param == "websocket" and server.http.get("/tokenflow/config").json().get("websocket") is not True:
        pytest.skip('this server has no WebSocket: GET /tokenflow/config does not say "websocket": true')
    return str(request.param)


def start(page: Any, transport: str, *, rate: float, tokens: int, question: str) -> str:
    """A stream read by the page; its id."""
    asked = {"transport": transport, "readRate": rate, "tokens": tokens, "question": question}
    page.evaluate(START, asked)
    return str(seen(page, "reader.id"))


def crowd(server: Server, count: int, tokens: int = TOKENS) -> list[LiveStream]:
    """Slow readers whose answers need more than the pool together: with eight or more of them somebody is parked."""
    slow = {"read_rate": 0.5}
    text = "reads slowly what the page shows. " * 8
    return [server.stream(f"{i} {text}", tokens, rid=f"crowd-{i}", tokenflow=slow) for i in range(count)]


def test_the_page_shows_a_park_and_a_return_as_they_happen(page: Any, server: Server) -> None:
    before = server.state()
    streams = crowd(server, 10)
    rid = str(seen(page, "document.querySelector('tr[data-phase=parked]')?.dataset.id"))
    assert rid.startswith("crowd-")
    assert any(r["parks"] > 0 for r in server.state()["streams"]), "the server knows of no park"
    seen(page, f"document.querySelector(\"#events li[data-what=park][data-id='{rid}']\")?.textContent")
    seen(page, "document.querySelector('#events li[data-what=return]')?.textContent")
    seen(page, "document.querySelector('tr[data-mark=return][data-phase=running]')?.textContent")
    read_together(streams)
    seen(page, "document.getElementById('count').textContent === '0'")
    told = [(t["what"], t["id"]) for t in server.state(before["seq"])["transitions"] if t["what"] in ("park", "return")]
    shown = page.evaluate("[...document.querySelectorAll('#events li')].map((e) => [e.dataset.what, e.dataset.id])")
    assert [tuple(e) for e in shown] == told[::-1][:12]
    assert f"{server.state()['counters']['parks']:,}" == page.inner_text("#counters div:has(dt:text-is('parks')) dd")


def test_the_chat_is_read_at_its_pace_and_the_servers_row_follows(page: Any, server: Server) -> None:
    """The server is told a sixth of what the page reads: without reports it would stay there."""
    page.route(CHAT, lambda route: route.continue_(post_data=longer(route.request.post_data_json)))
    page.evaluate("document.getElementById('rate').value = 12")
    page.click("#send")
    rid = str(seen(page, "document.getElementById('answer').dataset.id"))
    seen(page, f"document.querySelector(\"tr[data-id='{rid}'][data-own=true]\")?.textContent")
    row = server.row(rid, lambda r: r["consumed_tokens"] >= 24)
    read = int(page.evaluate("document.getElementById('answer').dataset.read"))
    received = int(page.evaluate("document.getElementById('answer').dataset.received"))
    assert row["generated_tokens"] > 2 * row["consumed_tokens"], "the page reads far behind the server"
    assert received > 2 * read
    assert page.evaluate("document.getElementById('ahead').textContent.length") > 0
    assert server.row(rid, lambda r: r["read_rate_tok_s"] > 4), "2 tok/s were declared: only reports tell more"
    seen(page, f"Number(document.querySelector(\"tr[data-id='{rid}']\").dataset.consumed) >= 24")
    page.click("#stop")
    until(lambda: rid not in {r["id"] for r in server.state()["streams"]}, "the end of a chat that was stopped")


def longer(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "max_tokens": 1200, "temperature": 0, "ignore_eos": True, "tokenflow": {"read_rate": 2}}


def test_a_quick_reader_is_noticed_after_three_reports_and_never_stalls_after_them(
    page: Any, server: Server, transport: str
) -> None:
    """It declares 6 tok/s and reads 12; the answer is long enough for the server to be there for its reports."""
    acks = server.state()["counters"]["acks"]
    rid = start(page, transport, rate=6, tokens=1500, question="who reads twice as fast?")
    page.evaluate("reader.setReadRate(12)")
    until(lambda: server.state()["counters"]["acks"] >= acks + 3, "three reports")
    at = page.evaluate("out.tokens")
    assert server.row(rid, lambda r: r["read_rate_tok_s"] > 8)
    seen(page, f"out.tokens >= {at} + 60")
    stalls = page.evaluate("out.stalls")
    assert [s for s in stalls if s["afterTokens"] >= at] == []
    page.evaluate("reader.cancel()")
    seen(page, "out.end === 'cancelled'")
    until(lambda: rid not in {r["id"] for r in server.state()["streams"]}, "the end of a stream that was cancelled")


def hide(page: Any, state: str) -> None:
    page.evaluate(
        "(s) => { Object.defineProperty(document, 'visibilityState', {value: s, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange', {bubbles: true})) }",
        state,
    )


def test_a_hidden_tab_reads_nothing_costs_others_nothing_and_misses_nothing(
    page: Any, server: Server, transport: str
) -> None:
    question = "who comes back to a hidden tab?"
    alone = {
        "model": "tiny",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    reply = server.http.post("/v1/chat/completions", json={**alone, "ignore_eos": True}).json()
    rid = start(page, transport, rate=20, tokens=TOKENS, question=question)
    seen(page, "out.pieces >= 20")
    hide(page, "hidden")
    gone_s = time.monotonic()
    read = page.evaluate("reader.readTokens")
    others = crowd(server, 9, 300)
    until(
        lambda: time.monotonic() > gone_s + 3 and page.evaluate("reader.tokens") > read, "three seconds of a hidden tab"
    )
    assert page.evaluate("reader.readTokens") <= read + 1
    read_together(others)
    assert all(len(other.text) > 0 and other.finish["type"] == "length" for other in others)
    row = next((r for r in server.state()["streams"] if r["id"] == rid), None)
    assert row is None or row["consumed_tokens"] < row["generated_tokens"]
    stalled = page.evaluate("out.stalls.length")
    hide(page, "visible")
    assert page.evaluate("reader.readTokens") <= read + 5, "what was missed is not read in one go"
    page.evaluate("reader.setReadRate(1000)")
    seen(page, "out.end")
    out = page.evaluate("out")
    assert (out["end"], out["text"], out["tokens"]) == ("done", reply["choices"][0]["message"]["content"], TOKENS)
    assert len(out["stalls"]) == stalled, "a pause of the reader's own is no stall"


def test_the_example_of_the_documentation_does_what_it_says(page: Any, server: Server) -> None:
    code = re.findall(r"```js\n(.*?)```", (DOCS / "clients-js.md").read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 10
    html = f"<p id=answer></p><script type=module>{code}</script>"
    page.route("**/example.html", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.goto(page.url + "example.html")
    seen(page, "document.getElementById('answer').textContent.length > 20")
    row = until(lambda: server.state()["streams"], "the example's stream")[0]
    assert server.row(row["id"], lambda r: r["consumed_tokens"] >= 8)
