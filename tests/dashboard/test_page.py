"""The page in Chromium over invented states: 500 streams, two widths, hostile texts, a server in trouble."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import chromium, in_thread, seen, watched
from support.live import until
from support.state_server import StateServer, rid_of
from tokenflow_sgl.dashboard.app import Target, make_app

STREAMS = 500
# What is cut off, or sticks out of the window: text that an ellipsis shortens on purpose has its whole in a tooltip.
CLIPPED = """() => [...document.querySelectorAll("body *")].filter((e) => {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  if (!box.width || e.closest("#answer, option")) return false;
  const cut = style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1 && !e.title;
  return cut || box.right > innerWidth + 1 || box.left < -1;
}).map((e) => `${e.tagName}#${e.id}.${e.className}: ${e.textContent.slice(0, 40)}`)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def behind() -> StateServer:
    return StateServer(STREAMS)


@pytest.fixture
def dash(behind: StateServer) -> Iterator[str]:
    with in_thread(behind.app) as url, in_thread(make_app(Target(url, None, "open-sesame"))) as dash:
        yield dash


@pytest.fixture
def page(browser: Any, dash: str) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    wrong = watched(page)
    page.goto(dash)
    page.wait_for_selector("#streams tbody tr[data-id]")
    yield page
    page.close()
    assert wrong == []


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1440, "light"), (360, "dark"), (1440, "dark")])
def test_nothing_is_clipped_and_nothing_scrolls_sideways(page: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_selector("#events li")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLIPPED) == []
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)


def test_only_rows_in_view_exist_and_every_stream_can_be_scrolled_to(page: Any) -> None:
    rows = "document.querySelectorAll('#streams tbody tr[data-id]').length"
    assert 10 < page.evaluate(rows) < 40
    assert page.inner_text("#count") == str(STREAMS)
    page.evaluate("document.getElementById('scroll').scrollTop = 1e6")
    page.wait_for_selector(f"tr[data-id='{rid_of(STREAMS - 1)}']")
    assert 10 < page.evaluate(rows) < 40
    assert page.get_attribute("#streams", "aria-rowcount") == str(STREAMS + 1)


def test_a_stream_keeps_its_row_from_state_to_state(page: Any) -> None:
    kept = page.evaluate_handle(f"document.querySelector(\"tr[data-id='{rid_of(3)}']\")")
    polls = int(page.get_attribute("#paint", "data-count") or 0)
    seen(page, f"document.getElementById('paint').dataset.count >= {polls + 3}")
    assert page.evaluate("row => row.isConnected && row.dataset.id", kept) == rid_of(3)


def test_the_time_from_data_to_paint_is_measured_and_shown(page: Any) -> None:
    seen(page, "document.getElementById('paint').dataset.count >= 8")
    data = page.evaluate("({...document.getElementById('paint').dataset})")
    assert 0 < float(data["lastMs"]) <= float(data["mostMs"])
    assert page.inner_text("#paint-ms").startswith(f"{float(data['lastMs']):.0f} ms")
    print(f"data to paint with {STREAMS} streams: {page.inner_text('#paint-ms')}")


def test_the_server_is_asked_twice_a_second_at_most_and_not_at_all_by_a_hidden_page(
    page: Any, behind: StateServer
) -> None:
    began_s, before = time.monotonic(), behind.polls
    seen(page, f"document.getElementById('paint').dataset.count >= {before + 6}")
    assert behind.polls - before <= 2 * (time.monotonic() - began_s) + 1
    hide(page, "hidden")
    page.wait_for_timeout(700)  # the one that was under way
    asked = behind.polls
    page.wait_for_timeout(1500)
    assert behind.polls == asked
    hide(page, "visible")
    seen(page, f"document.getElementById('paint').dataset.count > {asked}")


def hide(page: Any, state: str) -> None:
    page.evaluate(
        "(s) => { Object.defineProperty(document, 'visibilityState', {value: s, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange', {bubbles: true})) }",
        state,
    )


def test_parks_and_returns_and_figures_are_those_of_the_state(page: Any) -> None:
    page.wait_for_selector("#events li[data-what=park]")
    page.wait_for_selector("#events li[data-what=return]")
    page.wait_for_selector("tr[data-mark=park], tr[data-mark=return]")
    assert "116,000 of 120,000" in page.inner_text("#tiles")
    assert "2.4 now, 1.1 usual" in page.inner_text("#tiles")
    counted = {d: int(page.inner_text(f"#phases [data-phase={d}] dd")) for d in ("running", "parked", "waiting")}
    assert sum(counted.values()) == STREAMS and counted["parked"] > 0
    assert "its admin key for the state" in page.inner_text("#keys")


def test_the_order_can_be_chosen(page: Any) -> None:
    page.select_option("#sort", "phase")
    seen(page, "document.querySelector('#streams tbody tr[data-id]').dataset.phase === 'waiting'")
    page.select_option("#sort", "buffer")
    seen(page, "document.querySelector('#streams tbody tr[data-id]').dataset.phase !== 'waiting'")


def test_a_models_text_is_text_and_never_markup(page: Any, behind: StateServer) -> None:
    behind.texts = ["<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "&amp; \N{WAVING HAND SIGN}"]
    page.fill("#prompt", "say <b>hello</b>")
    page.evaluate("document.getElementById('rate').max = 1000; document.getElementById('rate').value = 1000")
    page.click("#send")
    seen(page, "document.getElementById('chat-state').textContent.startsWith('read to the end')")
    assert page.evaluate("document.getElementById('read').textContent") == "".join(behind.texts)
    assert page.evaluate("document.querySelectorAll('#answer :not(span)').length") == 0
    sent = json.loads(behind.requests("/v1/chat/completions")[0][1])
    assert sent["messages"] == [{"role": "user", "content": "say <b>hello</b>"}]
    assert (sent["model"], sent["tokenflow"]) == ("tiny", {"read_rate": 1000})


def test_the_chat_reads_at_its_pace_shows_what_waits_and_reports_it(page: Any, behind: StateServer) -> None:
    behind.texts = [f"word{i} " for i in range(200)]
    behind.hold.clear()
    page.evaluate("document.getElementById('rate').value = 10")
    page.click("#send")
    seen(page, "document.getElementById('read').textContent.includes('word12 ')")
    both = page.evaluate("[document.getElementById('read').textContent, document.getElementById('ahead').textContent]")
    assert both[0] + both[1] == "".join(behind.texts)
    acks = [json.loads(body)["acks"] for _, body in behind.requests("/tokenflow/ack")]
    assert acks and all(
        a[0] | {"consumed_tokens": 0} == {"id": "mine", "token": "secret", "consumed_tokens": 0} for a in acks
    )
    said = [a[0]["consumed_tokens"] for a in acks]
    assert said == sorted(set(said)) and said[-1] <= 20
    page.click("#stop")
    seen(page, "document.getElementById('chat-state').textContent.startsWith('stopped')")
    assert behind.left.wait(10), "the server goes on with a chat that was stopped"


def test_a_chat_that_breaks_off_says_so_and_keeps_what_was_read(page: Any, behind: StateServer) -> None:
    behind.texts, behind.ends = ["half ", "a "], False
    page.click("#send")
    seen(page, "document.getElementById('chat-state').textContent.includes('broke after 2 tokens')")
    assert page.inner_text("#read") == "half a "
    assert len(behind.requests("/v1/chat/completions")) == 1


@pytest.fixture
def over_socket(browser: Any, behind: StateServer, dash: str) -> Iterator[Any]:
    pytest.importorskip("websockets", reason="no websockets: neither the page's server nor the stand-in can speak it")
    behind.websocket, behind.texts = True, [f"word{i} " for i in range(60)]
    page = browser.new_page()
    wrong = watched(page)
    page.goto(dash)
    seen(page, "document.getElementById('transport').length === 2")
    page.select_option("#transport", "websocket")
    page.evaluate("document.getElementById('rate').value = 20")
    yield page
    page.close()
    assert wrong == []


def test_a_chat_over_the_socket_reads_reports_and_ends(over_socket: Any, behind: StateServer) -> None:
    behind.hold.clear()
    over_socket.click("#send")
    until(lambda: sum(m.get("type") == "ack" for m in behind.heard) >= 3, "three reports")
    behind.hold.set()
    seen(over_socket, "document.getElementById('chat-state').textContent.startsWith('read to the end')")
    assert over_socket.evaluate("document.getElementById('read').textContent") == "".join(behind.texts)
    asked, *acks = behind.heard
    assert (asked["model"], asked["tokenflow"], asked["stream"]) == ("tiny", {"read_rate": 20}, True)
    said = [ack.pop("consumed_tokens") for ack in acks]
    assert said == sorted(set(said)) and acks == [{"type": "ack"}] * len(acks)


def test_a_chat_over_the_socket_that_is_stopped_is_cancelled(over_socket: Any, behind: StateServer) -> None:
    behind.hold.clear()
    over_socket.click("#send")
    seen(over_socket, "document.getElementById('read').textContent.includes('word2 ')")
    over_socket.click("#stop")
    seen(over_socket, "document.getElementById('chat-state').textContent.startsWith('stopped')")
    assert behind.left.wait(10) and behind.heard[-1] == {"type": "cancel"}


def test_a_socket_that_ends_in_mid_answer_is_said_to_have_broken(over_socket: Any, behind: StateServer) -> None:
    behind.ends = False
    over_socket.click("#send")
    seen(over_socket, "document.getElementById('chat-state').textContent.includes('broke after 60 tokens')")
    assert over_socket.evaluate("document.getElementById('read').textContent") == "".join(behind.texts)


def test_a_server_that_wants_a_key_is_quoted_and_the_page_recovers(
    browser: Any, dash: str, behind: StateServer
) -> None:
    behind.state_status = 401
    page = browser.new_page()
    page.goto(dash)
    page.wait_for_selector("#trouble:not([hidden])")
    assert "a key is missing" in page.inner_text("#trouble") and "--admin-key" in page.inner_text("#trouble")
    behind.state_status = 200
    page.wait_for_selector("#trouble", state="hidden")
    page.wait_for_selector("#streams tbody tr[data-id]")
    page.close()


def test_every_control_has_a_name_and_the_text_is_readable(page: Any) -> None:
    """Contrast after WCAG 2: 4.5 to 1 for text, in both schemes."""
    assert (
        page.evaluate("""() => [...document.querySelectorAll("input, select, textarea, button, canvas")]
        .filter((e) => !e.labels?.length && !e.textContent.trim() && !e.getAttribute("aria-label"))
        .map((e) => e.id)""")
        == []
    )
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        values = page.evaluate("""() => { const s = getComputedStyle(document.documentElement);
            return Object.fromEntries(["paper", "card", "ink", "faint", "alarm", "park-wash", "return-wash", "own-wash"]
              .map((n) => [n, s.getPropertyValue("--" + n).trim()])) }""")
        pairs = [("ink", b) for b in ("paper", "card", "park-wash", "return-wash", "own-wash")]
        pairs += [(t, b) for t in ("faint", "alarm") for b in ("paper", "card")]
        poor = {(t, b): contrast(values[t], values[b]) for t, b in pairs if contrast(values[t], values[b]) < 4.5}
        assert not poor, scheme


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
