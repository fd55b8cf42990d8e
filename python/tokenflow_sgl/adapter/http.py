"""The bridge in front of SGLang's generating routes: read rates, request ids, ack tokens and their reply headers.

Owns the rewriting of request bodies; owns no route (see routes.py) and no rule about rates or ids (rates.py, rids.py).
Invariant: a request that the bridge does not understand (other routes, bodies that are no JSON object, compressed
bodies) passes byte for byte, and a response is never held back: upstream's own errors, streams and disconnects stay.

Pure ASGI: a BaseHTTPMiddleware would hide the client's disconnect from the engine, which then decodes for nobody. It is
the innermost middleware: keys are checked, bodies decompressed and CORS headers added outside it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from . import prompts, rates, rids
from .acks import MAX_INDEX, AckBook
from .backpressure import EXCHANGE, App, Receive
from .keepalive import KeepAlive, Message, Send
from .rates import BadField

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
ROUTES = {CHAT: ("POST",), COMPLETIONS: ("POST",), GENERATE: ("POST", "PUT")}
RID_HEADER = b"x-tokenflow-request-id"
ACK_TOKEN_HEADER = b"x-tokenflow-ack-token"
RETRY_AFTER = (b"retry-after", b"1")  # s. A full queue moves with every answer that ends; upstream names no time
# Upstream's own way to set the id by header; it wins over the body, so it is what the scheduler will know.
RID_OVERRIDE_HEADER = "x-override-rid"


@dataclass(frozen=True)
class Server:
    """What the bridge must know of the server it stands in front of.

    live_rids: ids in use. reasoning_parser: reasoning is split off, and can therefore be withheld.
    rid_override: upstream reads the id from a header. acks: where streams are opened for reports of consumption.
    comment_s: seconds of silence in an event stream after which a comment is sent, 0 = never. vocab_size: of the model,
    None = unknown.
    """

    live_rids: Container[str]
    reasoning_parser: bool = False
    rid_override: bool = False
    acks: AckBook | None = None
    comment_s: float = 0.0
    vocab_size: int | None = None


def error_content(error: BadField) -> dict[str, Any]:
    """The OpenAI error shape of a refused value; its status is 400."""
    return {"error": {"message": str(error), "type": "invalid_request_error", "param": error.field, "code": 400}}


class Bridge:
    """ASGI middleware. `server` is called at each request: the tokenizer manager may be replaced after start."""

    def __init__(self, app: App, server: Callable[[], Server]) -> None:
        self.app = app
        self.server = server
        self.bridged_requests = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        route = _route(scope)
        if route is None:
            await self.app(scope, receive, send)
            return
        messages, body = await _read(receive)
        parsed = _object(body)
        if parsed is None:
            await self.app(scope, _replay(messages, receive), send)
            return
        self.bridged_requests += 1
        server = self.server()
        try:
            rid = rewrite(route, scope["headers"], parsed, server)
            body = dumped(parsed)
        except BadField as error:
            await _refuse(send, error)
            return
        replay = _replay([{"type": "http.request", "body": body, "more_body": False}], receive)
        headers = [] if rid is None else [(RID_HEADER, rids.header_value(rid))]
        if rid is None or server.acks is None or not _is_true(parsed.get("stream")):
            await self.app(_with_length(scope, len(body)), replay, _with_headers(headers, send))
            return
        acks, token = server.acks, server.acks.open(rid, choices_of(route, parsed))
        if (exchange := scope.get(EXCHANGE)) is not None:
            exchange.rid, exchange.token = rid, token
        headers += [(ACK_TOKEN_HEADER, token.encode()), (b"x-accel-buffering", b"no")]  # nginx would hold tokens back

        async def closing(message: Message) -> None:
            # Not only when the app returns: upstream's reply has a task behind it that lasts for 2 s, and its id may be
            # used again from now on.
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                acks.close(rid, token)
                if exchange is not None:
                    exchange.is_over = True
            await send(message)

        scope, named = _with_length(scope, len(body)), _with_headers(headers, closing)
        try:
            if server.comment_s <= 0.0:
                await self.app(scope, replay, named)
                return
            async with KeepAlive(named, server.comment_s) as alive:
                await self.app(scope, replay, alive.send)
        finally:
            acks.close(rid, token)  # a client that left


def rewrite(route: str, headers: list[tuple[bytes, bytes]], body: dict[str, Any], server: Server) -> str | None:
    """Turn what the client says about its reader and its id into upstream's own fields, in place.

    Returns the id for the reply header: the client's or a fresh one; the parent's for n > 1 and for batches, whose
    children upstream derives; None for a list of ids, which the client knows. Raises BadField.
    """
    rate = rates.parse_header(_values(headers, rates.HEADER))
    if rates.BODY_FIELD in body:
        rate = rates.agree(rate, rates.parse_body_field(body.pop(rates.BODY_FIELD)))
    if server.vocab_size is not None:
        prompts.check_token_ids(body, server.vocab_size)
    stream = _is_true(body.get("stream"))
    withheld = (
        route == CHAT
        and server.reasoning_parser
        and _is_false(body.get("stream_reasoning", True))
        and _is_true(body.get("separate_reasoning", True))
    )
    rid = _name(headers, body, server)
    declared = rates.declare(rate, stream=stream, withheld=withheld and stream)
    params = {} if declared is None else declared.to_params()
    if stream and rid is not None and choices_of(route, body) > 1:
        params["parent"] = rid
    _put(route, body, params)
    return rid


def choices_of(route: str, body: dict[str, Any]) -> int:
    """How many answers a request has: n for each of its prompts. 1 where upstream will refuse what it says."""
    holder = body.get("sampling_params") if route == GENERATE else body
    holder = holder[0] if isinstance(holder, list) and holder else holder  # one for each prompt: n is that of all
    n = holder.get("n") if isinstance(holder, dict) else None
    each = n if type(n) is int and n > 0 else 1
    return min(each * prompts.count(body), MAX_INDEX + 1)


def _put(route: str, body: dict[str, Any], said: dict[str, Any]) -> None:
    """Set custom_params["tokenflow"] wherever upstream takes custom_params from; the client's other params stay.

    /generate takes them from sampling_params, one dict or one per prompt; all items of a batch share one reader.
    Values of a type that upstream refuses are left as they are, for its own error.
    """
    if route == GENERATE:
        if body.get("sampling_params") is None and said:
            body["sampling_params"] = {}
        params = body.get("sampling_params")
        holders = params if isinstance(params, list) else [params]
    else:
        holders = [body]
    for holder in holders:
        if not isinstance(holder, dict):
            continue
        custom = holder.get("custom_params")
        if isinstance(custom, dict) and rates.PARAMS_KEY in custom:
            raise BadField(
                f"custom_params.{rates.PARAMS_KEY}",
                custom[rates.PARAMS_KEY],
                f"only what the server writes there; declare a rate in {rates.BODY_FIELD}.read_rate",
            )
        if said and (custom is None or isinstance(custom, dict)):
            holder["custom_params"] = {**(custom or {}), rates.PARAMS_KEY: said}


def _name(headers: list[tuple[bytes, bytes]], body: dict[str, Any], server: Server) -> str | None:
    if server.rid_override and (override := _values(headers, RID_OVERRIDE_HEADER)):
        rids.check_rid(override[0], server.live_rids, field=RID_OVERRIDE_HEADER)
        return override[0]
    rid = body.get("rid")
    if rid is None:
        rid = body["rid"] = uuid.uuid4().hex
    if isinstance(rid, list) and not prompts.is_batch(body):
        # Upstream fails on it inside a 200 response.
        raise BadField("rid", rid, rids.VALID_RID + "; a list only for a list of prompts")
    rids.check_rid(rid, server.live_rids)
    if server.acks is not None and isinstance(rid, str):
        # Upstream may not know it yet, or no more: a second token would leave the first stream without one.
        rids.check_rid(rid, server.acks)
    return rid if isinstance(rid, str) else None


def _route(scope: MutableMapping[str, Any]) -> str | None:
    if scope["type"] != "http":
        return None
    # uvicorn puts --fastapi-root-path in front of the path.
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path if scope["method"] in ROUTES.get(path, ()) else None


async def _read(receive: Receive) -> tuple[list[Message], bytes]:
    """All messages of the request, and its body. The last message is a disconnect when the client left in mid-body."""
    messages: list[Message] = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return messages, b"".join(m.get("body", b"") for m in messages if m["type"] == "http.request")


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """First what was read already, then the live channel: a later disconnect must reach the engine."""
    left = list(reversed(messages))

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed


def _object(body: bytes) -> dict[str, Any] | None:
    # orjson as upstream's routes: a bare NaN or a 65-bit integer is no JSON for either.
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


def dumped(body: dict[str, Any]) -> bytes:
    """Raises BadField for what orjson reads and does not write: it reads 1,024 levels and writes 254."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise BadField("body", "JSON nested too deeply", "up to 254 levels") from error


def _values(headers: list[tuple[bytes, bytes]], name: str) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.decode("latin-1").lower() == name]


def _with_length(scope: MutableMapping[str, Any], length: int) -> MutableMapping[str, Any]:
    framing = (b"content-length", b"transfer-encoding")
    headers = [(k, v) for k, v in scope["headers"] if k.lower() not in framing]
    return {**scope, "headers": [*headers, (b"content-length", b"%d" % length)]}


def _with_headers(headers: list[tuple[bytes, bytes]], send: Send) -> Send:
    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [*headers, RETRY_AFTER] if message["status"] in (429, 503) else headers
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return named


async def _refuse(send: Send, error: BadField) -> None:
    body = orjson.dumps(error_content(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_true(value: Any) -> bool:
    """As upstream's models read it: pydantic takes 1, "true" and "yes" for True."""
    return value == 1 or (isinstance(value, str) and value.lower() in ("1", "true", "t", "yes", "y", "on"))


def _is_false(value: Any) -> bool:
    """The same for False; what is neither is refused by upstream."""
    return value == 0 or (isinstance(value, str) and value.lower() in ("0", "false", "f", "no", "n", "off"))
