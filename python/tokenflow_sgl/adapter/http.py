"""The bridge in front of SGLang's generating routes: read rates, request ids and their reply header.

Owns the rewriting of request bodies; owns no route (see routes.py) and no rule about rates or ids (rates.py, rids.py).
Invariant: a request that the bridge does not understand (other routes, bodies that are no JSON object, compressed
bodies) passes byte for byte, and a response is never held back: upstream's own errors, streams and disconnects stay.

Pure ASGI: a BaseHTTPMiddleware would hide the client's disconnect from the engine, which then decodes for nobody. It is
the innermost middleware: keys are checked, bodies decompressed and CORS headers added outside it.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Container, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from . import rates, rids
from .rates import BadField

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

CHAT = "/v1/chat/completions"
GENERATE = "/generate"
ROUTES = {CHAT: ("POST",), "/v1/completions": ("POST",), GENERATE: ("POST", "PUT")}
RID_HEADER = b"x-tokenflow-request-id"
# Upstream's own way to set the id by header; it wins over the body, so it is what the scheduler will know.
RID_OVERRIDE_HEADER = "x-override-rid"


@dataclass(frozen=True)
class Server:
    """What the bridge must know of the server it stands in front of.

    live_rids: ids in use. reasoning_parser: reasoning is split off, and can therefore be withheld.
    rid_override: upstream reads the id from a header.
    """

    live_rids: Container[str]
    reasoning_parser: bool = False
    rid_override: bool = False


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
        try:
            rid = rewrite(route, scope["headers"], parsed, self.server())
        except BadField as error:
            await _refuse(send, error)
            return
        body = orjson.dumps(parsed)
        replay = _replay([{"type": "http.request", "body": body, "more_body": False}], receive)
        await self.app(_with_length(scope, len(body)), replay, _naming(rid, send))


def rewrite(route: str, headers: list[tuple[bytes, bytes]], body: dict[str, Any], server: Server) -> str | None:
    """Turn what the client says about its reader and its id into upstream's own fields, in place.

    Returns the id for the reply header: the client's or a fresh one; the parent's for n > 1 and for batches, whose
    children upstream derives; None for a list of ids, which the client knows. Raises BadField.
    """
    rate = rates.parse_header(_values(headers, rates.HEADER))
    if rates.BODY_FIELD in body:
        rate = rates.agree(rate, rates.parse_body_field(body.pop(rates.BODY_FIELD)))
    stream = _is_true(body.get("stream"))
    withheld = (
        route == CHAT
        and server.reasoning_parser
        and _is_false(body.get("stream_reasoning", True))
        and _is_true(body.get("separate_reasoning", True))
    )
    _put(route, body, rates.declare(rate, stream=stream, withheld=withheld and stream))
    return _name(headers, body, server)


def _put(route: str, body: dict[str, Any], declared: rates.Declared | None) -> None:
    """Set custom_params["tokenflow"] wherever upstream takes custom_params from; the client's other params stay.

    /generate takes them from sampling_params, one dict or one per prompt; all items of a batch share one reader.
    Values of a type that upstream refuses are left as they are, for its own error.
    """
    if route == GENERATE:
        if body.get("sampling_params") is None and declared is not None:
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
        if declared is not None and (custom is None or isinstance(custom, dict)):
            holder["custom_params"] = {**(custom or {}), rates.PARAMS_KEY: declared.to_params()}


def _name(headers: list[tuple[bytes, bytes]], body: dict[str, Any], server: Server) -> str | None:
    if server.rid_override and (override := _values(headers, RID_OVERRIDE_HEADER)):
        rids.check_rid(override[0], server.live_rids, field=RID_OVERRIDE_HEADER)
        return override[0]
    rid = body.get("rid")
    if rid is None:
        rid = body["rid"] = uuid.uuid4().hex
    if isinstance(rid, list) and not _is_batch(body):
        # Upstream fails on it inside a 200 response.
        raise BadField("rid", rid, rids.VALID_RID + "; a list only for a list of prompts")
    rids.check_rid(rid, server.live_rids)
    return rid if isinstance(rid, str) else None


def _is_batch(body: dict[str, Any]) -> bool:
    """Whether the request holds several prompts: a list of texts, or a list of lists of token ids."""
    prompts = next((body[key] for key in ("text", "input_ids", "input_embeds", "prompt") if body.get(key)), None)
    return isinstance(prompts, list) and isinstance(prompts[0], str | list)


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


def _values(headers: list[tuple[bytes, bytes]], name: str) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.decode("latin-1").lower() == name]


def _with_length(scope: MutableMapping[str, Any], length: int) -> MutableMapping[str, Any]:
    framing = (b"content-length", b"transfer-encoding")
    headers = [(k, v) for k, v in scope["headers"] if k.lower() not in framing]
    return {**scope, "headers": [*headers, (b"content-length", b"%d" % length)]}


def _naming(rid: str | None, send: Send) -> Send:
    if rid is None:
        return send

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (RID_HEADER, rids.header_value(rid))]}
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
