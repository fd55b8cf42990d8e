"""The bridge in front of an app that echoes: what reaches the app, what reaches the client, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from tokenflow_sgl.adapter import prompts, rates
from tokenflow_sgl.adapter.acks import AckBook
from tokenflow_sgl.adapter.http import Bridge, Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"


class Echo:
    """Keeps what it was sent and answers 200 in two chunks."""

    def __init__(self) -> None:
        self.scope: Any = None
        self.body: bytes | None = None
        self.after_body: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.after_body = "http.disconnect"
                return
            body += message["body"]
            if not message.get("more_body"):
                break
        self.body = body
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    @property
    def json(self) -> Any:
        assert self.body is not None, "the request never reached the app"
        return json.loads(self.body)


class Exchange:
    """One request through the bridge. `sent` are the messages the client got."""

    def __init__(
        self,
        body: Any,
        *,
        path: str = CHAT,
        headers: Any = (),
        server: Server | None = None,
        chunks: int = 1,
        method: str = "POST",
        root_path: str = "",
        app: Any = None,
    ) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.app = Echo() if app is None else app
        self.sent: list[Any] = []
        self.bridge = Bridge(self.app, lambda: server or Server(live_rids=()))
        scope = {
            "type": "http",
            "method": method,
            "path": root_path + path,
            "root_path": root_path,
            "headers": [(b"content-length", b"%d" % len(raw)), *((k.encode(), v.encode()) for k, v in headers)],
        }
        size = max(1, -(-len(raw) // chunks))
        pieces = [raw[i : i + size] for i in range(0, len(raw), size)] or [b""]
        messages = [
            {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1} for i, piece in enumerate(pieces)
        ]
        self.messages = [*messages, {"type": "http.disconnect"}]
        self.original_scope = json.dumps({k: str(v) for k, v in scope.items()})

        async def receive() -> Any:
            return self.messages.pop(0)

        async def send(message: Any) -> None:
            self.sent.append(message)

        asyncio.run(self.bridge(scope, receive, send))
        assert self.original_scope == json.dumps({k: str(v) for k, v in scope.items()}), (
            "the caller's scope was changed"
        )

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def error(self) -> Any:
        assert self.status == 400, self.sent
        return json.loads(self.sent[1]["body"])["error"]

    @property
    def custom(self) -> Any:
        return (self.app.json.get("custom_params") or {}).get("tokenflow")

    def header(self, name: bytes) -> bytes | None:
        return dict(self.sent[0]["headers"]).get(name)


BAD_FIELD_RATES: list[Any] = [
    0,
    0.0,
    -0.0,
    -1,
    1e-300,
    0.0999,
    1000.1,
    1e308,
    10**18,
    "8",
    "fast",
    "Infinity",
    "NaN",
    "INF",
    "",
    True,
    False,
    None,
    [],
    [8],
    {},
    "x" * 1_000_000,
]
BAD_HEADER_RATES = [
    "0", "0.0", "-0.0", "-1", "+8", "1e-300", "1e308", str(10**30), "NaN", "nan", "Infinity", "INF", "5;6", "8, 8",
    "\uff15",     "1_0", "0x8", "true", "fast", "", "8 9", "8e", ".5", "9" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("rate", BAD_FIELD_RATES, ids=lambda r: repr(r)[:20])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_bad_rate_in_the_body_is_refused_by_name_and_never_reaches_the_engine(path: str, rate: Any) -> None:
    exchange = Exchange({"stream": True, "tokenflow": {"read_rate": rate}}, path=path)
    assert exchange.app.body is None
    assert exchange.error["param"] == "tokenflow.read_rate"
    assert exchange.error["type"] == "invalid_request_error"
    for part in ("tokenflow.read_rate", "0.1 to 1000", '"inf"'):
        assert part in exchange.error["message"]
    assert len(exchange.error["message"]) < 400, "a hostile value is echoed in full"


@pytest.mark.parametrize("rate", BAD_HEADER_RATES, ids=lambda r: r[:12])
def test_bad_rate_in_the_header_is_refused_by_name(rate: str) -> None:
    exchange = Exchange({"stream": True}, headers=[("X-TokenFlow-Read-Rate", rate)])
    assert exchange.app.body is None
    assert exchange.error["param"] == "x-tokenflow-read-rate"
    with pytest.raises(rates.BadField):
        rates.parse_header([rate])


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", str(10**30)])
def test_rate_that_is_no_json_reaches_the_engine_untouched_for_its_own_error(text: str) -> None:
    raw = b'{"stream": true, "tokenflow": {"read_rate": %s}}' % text.encode()
    exchange = Exchange(raw)
    if exchange.status == 200:
        assert exchange.app.body == raw
    else:
        assert exchange.error["param"] == "tokenflow.read_rate"


@pytest.mark.parametrize(
    "value, field",
    [
        ([], "tokenflow"),
        (8, "tokenflow"),
        (None, "tokenflow"),
        ("8", "tokenflow"),
        ({"rate": 8}, "tokenflow.rate"),
        ({"read_rate": 8, "class": "agent"}, "tokenflow.class"),
    ],
)
def test_anything_but_an_object_with_a_read_rate_is_refused(value: Any, field: str) -> None:
    assert Exchange({"stream": True, "tokenflow": value}).error["param"] == field


@pytest.mark.parametrize(
    ("field", "given", "refused"),
    [
        ("input_ids", [0, 9], False),
        ("input_ids", [[1], [2, 9.0]], False),
        ("input_ids", [10], True),
        ("input_ids", [-1], True),
        ("input_ids", [1, "10"], True),
        ("input_ids", [[1], [2, 10.0]], True),
        ("prompt", "10", False),
        ("prompt", ["10", "-1"], False),
        ("prompt", [1, "10"], True),
        ("prompt", [["10"]], True),
        ("prompt", [[1], 10], True),
        ("prompt", [2**63], True),
    ],
)
def test_token_ids_that_the_model_does_not_have_are_refused_by_name(field: str, given: Any, refused: bool) -> None:
    """They would end the scheduler."""
    body = {field: given}
    if not refused:
        prompts.check_token_ids(body, 10)
        return
    with pytest.raises(rates.BadField) as error:
        prompts.check_token_ids(body, 10)
    assert error.value.field == field and "0 to 9" in str(error.value)


def test_rate_may_come_by_body_or_header_or_both_in_agreement() -> None:
    header = [("X-TokenFlow-Read-Rate", "8.0")]
    expected = {"class": "reader", "withheld": False, "rate": 8.0}
    assert Exchange({"stream": True, "tokenflow": {"read_rate": 8}}).custom == expected
    assert Exchange({"stream": True}, headers=header).custom == expected
    assert Exchange({"stream": True, "tokenflow": {"read_rate": 8}}, headers=header).custom == expected
    assert Exchange({"stream": True, "tokenflow": {}}, headers=header).custom == expected


def test_header_and_body_that_disagree_are_refused() -> None:
    exchange = Exchange({"stream": True, "tokenflow": {"read_rate": 9}}, headers=[("x-tokenflow-read-rate", "8")])
    assert "8" in exchange.error["message"] and "9" in exchange.error["message"]
    assert Exchange({"stream": True, "tokenflow": {"read_rate": 9}}, headers=[("x-tokenflow-read-rate", "inf")]).error


def test_two_headers_that_disagree_are_refused_and_two_that_agree_are_not() -> None:
    name = "x-tokenflow-read-rate"
    assert Exchange({"stream": True}, headers=[(name, "8"), (name, "9")]).error
    assert Exchange({"stream": True}, headers=[(name, "8"), (name, "8.0")]).custom["rate"] == 8.0


@pytest.mark.parametrize("rate, expected", [(0.1, 0.1), (1000, 1000.0), (6.5, 6.5)])
def test_bounds_are_valid_rates(rate: float, expected: float) -> None:
    assert Exchange({"stream": True, "tokenflow": {"read_rate": rate}}).custom["rate"] == expected


def test_inf_makes_an_agent_and_silence_leaves_the_request_alone() -> None:
    assert Exchange({"stream": True, "tokenflow": {"read_rate": "inf"}}).custom == {
        "class": "agent",
        "withheld": False,
        "rate": "inf",
    }
    assert Exchange({"stream": True}).custom is None


@pytest.mark.parametrize("stream", [False, 0, "false", None])
def test_request_that_is_not_streamed_has_no_reader(stream: Any) -> None:
    body = {"tokenflow": {"read_rate": 8}} if stream is None else {"stream": stream, "tokenflow": {"read_rate": 8}}
    assert Exchange(body).custom == {"class": "batch", "withheld": False, "rate": 8.0}
    assert Exchange({}).custom == {"class": "batch", "withheld": False}


def test_other_custom_params_of_the_client_are_kept() -> None:
    exchange = Exchange({"stream": True, "tokenflow": {"read_rate": 8}, "custom_params": {"length": 7}})
    assert exchange.app.json["custom_params"] == {
        "length": 7,
        "tokenflow": {"class": "reader", "withheld": False, "rate": 8.0},
    }
    assert "tokenflow" not in exchange.app.json


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_forged_scheduler_params_are_refused(path: str) -> None:
    forged = {"tokenflow": {"rate": 1e9, "class": "reader"}}
    body = {"sampling_params": {"custom_params": forged}} if path == GENERATE else {"custom_params": forged}
    assert Exchange({"stream": True, **body}, path=path).error["param"] == "custom_params.tokenflow"


def test_every_item_of_a_generate_batch_carries_the_rate() -> None:
    one = {"class": "reader", "withheld": False, "rate": 8.0, "parent": "mine"}
    rate = {"stream": True, "rid": "mine", "text": ["a", "b"], "tokenflow": {"read_rate": 8}}
    assert Exchange(rate, path=GENERATE).app.json["sampling_params"] == {"custom_params": {"tokenflow": one}}
    lists = {**rate, "sampling_params": [{"n": 2}, {"n": 2, "custom_params": {"k": 1}}]}
    first, second = Exchange(lists, path=GENERATE).app.json["sampling_params"]
    assert first == {"n": 2, "custom_params": {"tokenflow": one}}
    assert second == {"n": 2, "custom_params": {"k": 1, "tokenflow": one}}
    forged = {**rate, "sampling_params": [{}, {"custom_params": {"tokenflow": {}}}]}
    assert Exchange(forged, path=GENERATE).error


@pytest.mark.parametrize("value", [7, "x", [3]])
def test_params_of_a_wrong_type_are_left_for_upstream_to_refuse(value: Any) -> None:
    assert Exchange({"stream": True, "sampling_params": value}, path=GENERATE).app.json["sampling_params"] == value
    assert Exchange({"custom_params": value}).app.json["custom_params"] == value


def test_withheld_reasoning_is_marked_only_where_it_is_withheld() -> None:
    parser = Server(live_rids=(), reasoning_parser=True)
    withheld = {"stream": True, "stream_reasoning": False}
    assert Exchange(withheld, server=parser).custom == {"class": "reader", "withheld": True}
    rated = {**withheld, "tokenflow": {"read_rate": 4}}
    assert Exchange(rated, server=parser).custom == {"class": "reader", "withheld": True, "rate": 4.0}
    assert Exchange(withheld).custom is None  # no parser: everything is shown
    assert Exchange({**withheld, "separate_reasoning": False}, server=parser).custom is None
    assert Exchange({"stream": True}, server=parser).custom is None
    assert Exchange(withheld, server=parser, path=COMPLETIONS).custom is None


def test_fresh_id_is_given_and_told() -> None:
    exchange = Exchange({"stream": True})
    rid = exchange.app.json["rid"]
    assert len(rid) == 32 and exchange.header(b"x-tokenflow-request-id") == rid.encode()


def test_id_of_the_client_is_kept_and_told() -> None:
    exchange = Exchange({"stream": True, "rid": "job/1 50%é"})
    assert exchange.app.json["rid"] == "job/1 50%é"
    assert exchange.header(b"x-tokenflow-request-id") == b"job/1%2050%%C3%A9"


@pytest.mark.parametrize(
    "rid", ["", "x" * 257, "x" * 10_000, "a\nb", "a\x00", "\x7f", "\x85", "HEALTH_CHECK_1", "live"]
)
def test_id_that_is_empty_too_long_unprintable_reserved_or_live_is_refused(rid: str) -> None:
    server = Server(live_rids={"live"})
    assert Exchange({"rid": rid}, server=server).error["param"] == "rid"
    batch = {"rid": ["fine", rid], "text": ["x", "y"]}
    assert Exchange(batch, server=server, path=GENERATE).error["param"] == "rid"


def test_id_that_begins_like_a_live_one_is_accepted_because_aborts_are_exact() -> None:
    server = Server(live_rids={"u1"})
    assert Exchange({"rid": "u10"}, server=server).status == 200
    assert Exchange({"rid": "u"}, server=server).status == 200


def test_list_of_ids_is_kept_and_not_told_again() -> None:
    exchange = Exchange({"rid": ["a", "b"], "text": ["x", "y"]}, path=GENERATE)
    assert exchange.app.json["rid"] == ["a", "b"]
    assert exchange.header(b"x-tokenflow-request-id") is None


def test_id_override_header_wins_where_upstream_reads_it() -> None:
    header = [("X-Override-Rid", "from-header")]
    on = Server(live_rids={"taken"}, rid_override=True)
    assert Exchange({}, headers=header, server=on).header(b"x-tokenflow-request-id") == b"from-header"
    assert Exchange({}, headers=[("x-override-rid", "taken")], server=on).error["param"] == "x-override-rid"
    assert Exchange({}, headers=header).header(b"x-tokenflow-request-id") != b"from-header"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b'"x"', b"\x1f\x8b\x08\x00compressed", b'{"a": NaN}'])
def test_body_that_is_no_json_object_passes_byte_for_byte(raw: bytes) -> None:
    exchange = Exchange(raw, chunks=3)
    assert exchange.app.body == raw
    assert dict(exchange.app.scope["headers"])[b"content-length"] == b"%d" % len(raw)


def test_compressed_body_keeps_its_encoding_header() -> None:
    exchange = Exchange(b"\x28\xb5\x2f\xfd", headers=[("content-encoding", "zstd")])
    assert dict(exchange.app.scope["headers"])[b"content-encoding"] == b"zstd"


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_content_length_fits_the_new_body_however_it_came(chunks: int) -> None:
    exchange = Exchange({"stream": True, "text": "x" * 100}, headers=[("transfer-encoding", "chunked")], chunks=chunks)
    headers = exchange.app.scope["headers"]
    assert [v for k, v in headers if k == b"content-length"] == [b"%d" % len(exchange.app.body)]
    assert not [v for k, v in headers if k == b"transfer-encoding"]
    assert exchange.app.json["text"] == "x" * 100


def test_large_numbers_and_text_survive_the_rewriting() -> None:
    body = {
        "stream": True,
        "seed": 2**63 - 1,
        "temperature": 0.1 + 0.2,
        "text": "ä\u2028\U0001f600",
        "logit_bias": {"5": -1e-9},
    }
    received = Exchange(body).app.json
    assert {k: received[k] for k in body} == body


@pytest.mark.parametrize(
    "method, path", [("GET", CHAT), ("POST", "/v1/responses"), ("POST", "/generate/"), ("PUT", CHAT)]
)
def test_other_routes_and_methods_pass_untouched(method: str, path: str) -> None:
    raw = b'{"tokenflow": 1, "rid": ""}'
    exchange = Exchange(raw, path=path, method=method)
    assert exchange.app.body == raw and exchange.header(b"x-tokenflow-request-id") is None


def test_put_on_generate_is_bridged_as_post_is() -> None:
    assert Exchange({"tokenflow": 1}, path=GENERATE, method="PUT").error


def test_root_path_in_front_of_the_route_is_seen_through() -> None:
    assert Exchange({"stream": True, "tokenflow": {"read_rate": 8}}, root_path="/llm").custom["rate"] == 8.0
    assert Exchange({"tokenflow": 1}, root_path="/llm").error


def test_lifespan_and_websocket_pass() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    bridge = Bridge(app, lambda: Server(live_rids=()))
    for kind in ("lifespan", "websocket"):
        asyncio.run(bridge({"type": kind, "path": CHAT}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


def test_client_that_leaves_while_sending_is_seen_by_the_app() -> None:
    app = Echo()
    messages = [{"type": "http.request", "body": b'{"str', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asyncio.run(Bridge(app, lambda: Server(live_rids=()))(scope, receive, None))  # type: ignore[arg-type]
    assert app.after_body == "http.disconnect" and app.body is None


def test_client_that_leaves_in_mid_stream_is_seen_by_the_app() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    Exchange({"stream": True}, app=app)
    assert seen == ["http.request", "http.disconnect"]


def test_each_chunk_of_a_response_passes_before_the_next_is_made() -> None:
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for name in ("a", "b", "c"):
            order.append(f"made {name}")
            await send({"type": "http.response.body", "body": name.encode(), "more_body": name != "c"})

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"stream": true}', "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            order.append(f"got {message['body'].decode()}")

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asyncio.run(Bridge(app, lambda: Server(live_rids=()))(scope, receive, send))
    assert order == ["made a", "got a", "made b", "got b", "made c", "got c"]


@pytest.mark.parametrize(
    "said", [None, 7, {"rate": "x"}, {"rate": float("nan")}, {"rate": -1}, {"rate": [1]}, {"rate": True}, "abc"]
)
def test_scheduler_takes_the_default_rate_for_whatever_did_not_come_from_the_bridge(said: Any) -> None:
    got = rates.from_custom_params({"tokenflow": said}, stream=True, default_rate_tok_s=6.0)
    assert got == rates.Declared(6.0, "reader")


def test_scheduler_reads_what_the_bridge_wrote() -> None:
    def read(declared: rates.Declared | None, stream: bool = True) -> rates.Declared:
        params = None if declared is None else {"tokenflow": declared.to_params()}
        return rates.from_custom_params(params, stream=stream, default_rate_tok_s=6.0)

    assert read(rates.declare(8.0, stream=True, withheld=False)) == rates.Declared(8.0, "reader")
    assert read(rates.declare(math.inf, stream=True, withheld=False)) == rates.Declared(math.inf, "agent")
    assert read(rates.declare(None, stream=True, withheld=True)) == rates.Declared(6.0, "reader", True)
    assert read(rates.declare(None, stream=True, withheld=False)) == rates.Declared(6.0, "reader")
    assert read(rates.declare(8.0, stream=False, withheld=False), stream=False) == rates.Declared(None, "batch")


@pytest.mark.parametrize("body", [{"text": "x"}, {"input_ids": [1, 2]}, {"prompt": "x"}, {}])
def test_a_list_of_ids_for_one_prompt_is_refused_before_the_response_begins(body: dict[str, Any]) -> None:
    for ids in (["a"], []):
        assert Exchange({**body, "rid": ids}, path=GENERATE).error["param"] == "rid"


# ---- ack tokens


def with_acks() -> tuple[Server, AckBook]:
    book = AckBook()
    return Server(live_rids=(), acks=book), book


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_a_stream_is_given_an_ack_token_that_is_good_while_it_lives(path: str) -> None:
    server, book = with_acks()
    seen: list[int] = []
    opened = book.open

    def open_(rid: str, choices: int = 1) -> str:
        token = opened(rid, choices)
        seen.append(len(book))
        return token

    book.open = open_  # type: ignore[method-assign]
    exchange = Exchange({"prompt": "x", "stream": True, "rid": "mine"}, path=path, server=server)
    token = exchange.header(b"x-tokenflow-ack-token")
    assert token is not None and len(token) >= 32 and seen == [1]
    assert len(book) == 0, "the stream has ended"


def test_an_id_whose_stream_upstream_does_not_know_yet_is_refused_and_keeps_its_token() -> None:
    server, book = with_acks()
    token = book.open("mine")
    assert Exchange({"stream": True, "rid": "mine"}, server=server).error["param"] == "rid"
    assert book.judge([{"id": "mine", "token": token, "consumed_tokens": 1}], 0.0)[1][0]["verdict"] == "accepted"


def test_an_id_is_free_again_with_the_last_byte_and_not_when_the_app_returns() -> None:
    server, book = with_acks()
    left: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        left.append(len(book))
        await send({"type": "http.response.body", "body": b""})
        left.append(len(book))  # and a task behind the reply goes on

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"stream": true, "rid": "mine"}', "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asyncio.run(Bridge(app, lambda: server)(scope, receive, send))
    assert left == [1, 0]


def test_what_is_not_streamed_or_refused_has_no_ack_token() -> None:
    server, book = with_acks()
    assert Exchange({"stream": False}, server=server).header(b"x-tokenflow-ack-token") is None
    assert Exchange({"stream": True, "tokenflow": {"read_rate": 0}}, server=server).status == 400
    assert len(book) == 0


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": "3"}, 1),  # upstream's to judge; its other choices cannot be reported
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (GENERATE, {"text": "a", "sampling_params": {"n": 2}}, 2),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
        (GENERATE, {"text": "a"}, 1),
    ],
)
def test_a_request_of_several_answers_can_be_reported_by_choice(path: str, body: dict[str, Any], choices: int) -> None:
    server, book = with_acks()
    counts: list[int] = []
    opened = book.open
    book.open = lambda rid, n=1: counts.append(n) or opened(rid, n)  # type: ignore[method-assign,func-returns-value]
    exchange = Exchange({"stream": True, "rid": "mine", **body}, path=path, server=server)
    assert counts == [choices]
    holder = exchange.app.json.get("sampling_params") if path == GENERATE else exchange.app.json
    holder = holder[0] if isinstance(holder, list) else holder
    said = ((holder or {}).get("custom_params") or {}).get("tokenflow") or {}
    assert said.get("parent") == ("mine" if choices > 1 else None)
    assert rates.parent_of({"tokenflow": said}) == said.get("parent")
