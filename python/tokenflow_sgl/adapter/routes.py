"""POST /tokenflow/ack, GET /tokenflow/state and GET /tokenflow/config, and the installation of all that is ours.

Owns what the HTTP process tells and hears; the facts are the scheduler's. Invariant: what shows what all clients are
doing needs the admin key if one is set (else the API key, if one is set); acks need the API key, and their token.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import ORJSONResponse
from starlette.middleware import Middleware
from starlette.websockets import WebSocket

from . import acks, args, backpressure, messages, rates, websocket
from .backpressure import Backpressure
from .http import Bridge, Server, error_content
from .mailbox import Mailbox

logger = logging.getLogger(__name__)
_MAX_ACK_BYTES = 1 << 20
_MAX_SEQ = 2**62  # a larger `since` cannot be the number of any transition


def since_of(text: str | None) -> int:
    """The `since` of a state request; 0 without one. Raises BadField."""
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= _MAX_SEQ):
        raise rates.BadField("since", text, "the integer `seq` of an earlier reply, 0 or more")
    return int(text)


def state_body(replies: list[dict[str, Any]], since: int) -> dict[str, Any]:
    """The reply of /tokenflow/state from the internal states of all data-parallel ranks.

    One rank: its state, transitions with `seq` > since only. Several: {"active", "ranks": [state, ...]}, each with its
    own `seq`. A rank whose scheduler is not ours shows as {"active": false}.
    """
    states = [dict(reply.get("tokenflow") or {"active": False}) for reply in replies]
    for state in states:
        if "transitions" in state:
            state["transitions"] = [t for t in state["transitions"] if t["seq"] > since]
    if len(states) == 1:
        return states[0]
    return {"active": bool(states) and all(s.get("active") for s in states), "ranks": states}


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server.get_global_state().tokenizer_manager


async def tokenflow_state(since: str | None = None) -> ORJSONResponse:
    """`since` is text: FastAPI's own refusal of a non-integer has another error shape."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    try:
        after = since_of(since)
    except rates.BadField as error:
        return ORJSONResponse(status_code=400, content=error_content(error))
    manager = _tokenizer_manager()
    manager.auto_create_handle_loop()
    replies = await manager.get_internal_state_communicator(GetInternalStateReq(rid=messages.state_rid(after)))
    return ORJSONResponse(state_body([r.internal_state for r in replies], after))


async def tokenflow_ack(request: Request) -> ORJSONResponse:
    """Verdicts item by item, 200; 400 for a body that holds something else than reports, and then none counts."""
    try:
        items = acks.items_of(await _json_of(request))
        taken, verdicts = _acks.judge(items, time.monotonic())
    except rates.BadField as error:
        return ORJSONResponse(status_code=400, content=error_content(error))
    if taken:
        _mailbox.report(taken)
    return ORJSONResponse({"acks": verdicts})


async def _dispatch(told: messages.AckReq) -> None:
    await _tokenizer_manager()._async_dispatch_to_scheduler(told)


class _Trimmer:
    """Of the outputs that wait for a reply which cannot be sent, all but the last go.

    Upstream keeps one for each token, some 1.5 kB, and takes the last: each holds the whole answer so far. Not where
    they are increments, of which it takes all. All live streams are looked through at once for all ids of half a
    second: for each id alone, clients that do not read could keep this process busy.
    """

    EVERY_S = 0.5

    def __init__(self) -> None:
        self._rids: set[str] = set()
        self._looked_s = -math.inf

    def __call__(self, rid: str) -> None:
        self._rids.add(rid)
        now_s = time.monotonic()
        if now_s - self._looked_s < self.EVERY_S:
            return  # each id comes again every second while its reply cannot be sent
        self._looked_s = now_s
        rids, self._rids = self._rids, set()
        manager = _tokenizer_manager()
        if manager.incremental_streaming_output:
            return
        for own_rid, state in manager.rid_to_state.items():
            if own_rid in rids or rates.parent_of(_custom_params(state.obj)) in rids:
                del state.out_list[:-1]


def _custom_params(request: Any) -> Any:
    params = getattr(request, "sampling_params", None)
    return params.get("custom_params") if isinstance(params, dict) else None


async def tokenflow_stream(ws: WebSocket) -> None:
    server_args = _tokenizer_manager().server_args
    await websocket.serve(
        ws,
        websocket.Server(
            acks=_acks,
            report=_mailbox.report,
            api_key=server_args.api_key,
            admin_api_key=server_args.admin_api_key,
            origins=args.settings_of(server_args).allowed_origins,
        ),
    )


async def _json_of(request: Request) -> Any:
    """Raises BadField."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_ACK_BYTES:
            raise rates.BadField("body", f"{len(body)} bytes and more", f"up to {_MAX_ACK_BYTES} bytes")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise rates.BadField("body", body[:64].decode("latin-1"), "a JSON object") from error


async def tokenflow_config() -> ORJSONResponse:
    from . import hooks, plugin

    settings = args.settings_of(_tokenizer_manager().server_args)
    return ORJSONResponse(
        {
            "policy": settings.policy,
            "config": settings.config.to_mapping(),
            "journal": settings.journal_path,
            "script": settings.script_path,
            "release": hooks.installed_release(),
            "read_rate": {"min_tok_s": rates.MIN_RATE_TOK_S, "max_tok_s": rates.MAX_RATE_TOK_S},
            "websocket": websocket.has_library(),
            "http": {
                "hooks": plugin.in_force(),
                "bridged_requests": bridge_of_app().bridged_requests,
                "acks": {"accepted": _acks.accepted, "refused": _acks.refused, "streams": len(_acks)},
                "unread": {"halted": _outermost[0].halted, "cut": _outermost[0].cut},
            },
        }
    )


def add_routes(app: FastAPI) -> None:
    """Directly on the app: the key check looks at the endpoints of app.routes only, and takes a route of an included
    router for one that needs no admin key."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for path, endpoint in (("/tokenflow/state", tokenflow_state), ("/tokenflow/config", tokenflow_config)):
        refusals = {400: {"description": "`since` is no number"}} if endpoint is tokenflow_state else {}
        guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)
        app.add_api_route(path, guarded, methods=["GET"], responses=refusals)
    # The endpoint reads the body itself, so that FastAPI knows nothing of it.
    reports = {"requestBody": {"required": True, "content": {"application/json": {"schema": acks.BODY_SCHEMA}}}}
    refused = {400: {"description": "no report at all: the error names the field"}}
    app.add_api_route("/tokenflow/ack", tokenflow_ack, methods=["POST"], openapi_extra=reports, responses=refused)
    app.add_api_websocket_route(websocket.PATH, tokenflow_stream)


_acks = acks.AckBook()
_mailbox = Mailbox(_dispatch)
_trim = _Trimmer()
_installed: list[Bridge] = []
_outermost: list[Backpressure] = []


def bridge_of_app() -> Bridge:
    """The live bridge of this process. Starlette builds middleware at the first request, after installation."""
    assert len(_installed) == 1, f"the bridge was built {len(_installed)} times, expected once"
    return _installed[0]


def _build_bridge(app: Any) -> Bridge:
    _installed[:] = [Bridge(app, _server)]
    return _installed[0]


def _build_outermost(app: Any) -> Backpressure:
    _outermost[:] = [Backpressure(app, _engine)]
    return _outermost[0]


def _engine() -> backpressure.Engine:
    limit_s = args.settings_of(_tokenizer_manager().server_args).stall_limit_s
    return backpressure.Engine(limit_s=limit_s, tell=_mailbox.halt, trim=_trim)


def _server() -> Server:
    from sglang.srt.environ import envs

    manager = _tokenizer_manager()
    return Server(
        live_rids=manager.rid_to_state,
        reasoning_parser=bool(manager.config_value("reasoning_parser")),
        rid_override=bool(envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.get()),
        acks=_acks,
        comment_s=args.settings_of(manager.server_args).sse_comments_s,
        vocab_size=manager.model_config.vocab_size,
    )


def install(app: FastAPI) -> None:
    """Put bridge and routes on `app`, once. Call before its first request: its middleware is built then."""
    if any(m.cls is _build_bridge for m in app.user_middleware):
        return
    add_routes(app)
    # Last in the list is innermost; add_middleware() would put it outside decompression and CORS.
    app.user_middleware.append(Middleware(_build_bridge))
    backpressure.put_outermost(app, _build_outermost)


def install_before_run(*_args: Any, **_kwargs: Any) -> None:
    """BEFORE hook of http_server._setup_and_run_http_server: the app exists, and serves nothing yet."""
    from sglang.srt.entrypoints import http_server

    install(http_server.app)
    logger.info("TokenFlow: read-rate bridge and /tokenflow routes installed")
    say_whether_sockets_work()


def say_whether_sockets_work() -> None:
    if not websocket.has_library():
        logger.warning(
            "TokenFlow: %s is off: uvicorn finds no WebSocket library (pip install websockets); all else is served",
            websocket.PATH,
        )
