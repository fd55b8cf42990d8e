"""The command `tokenflow dash`.

Owns its arguments. Invariant: the page is served on 127.0.0.1 only, whatever is asked for.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from .app import Target, make_app

ADDRESS = "127.0.0.1"


def _server_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid is a URL such as http://127.0.0.1:30000")
    return text.rstrip("/")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tokenflow dash",
        description="The live page of one server, on 127.0.0.1 only; whoever reaches its port uses the keys given.",
    )
    made.add_argument("--server", type=_server_url, required=True, help="the TokenFlow server, http://HOST:PORT")
    made.add_argument("--port", type=int, default=8765, help="of the page; 0 picks a free one (default: %(default)s)")
    for name, use in (("api", "the chat box and its reports"), ("admin", "the streams of all clients")):
        variable = f"TOKENFLOW_{name.upper()}_KEY"  # a command line can be read by everybody on the machine
        text = f"the server's {name} key, for {use} (default: ${variable})"
        made.add_argument(f"--{name}-key", default=os.environ.get(variable), help=text)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    import uvicorn

    args = parser().parse_args(argv)
    app = make_app(Target(args.server, args.api_key, args.admin_key))
    # uvicorn itself says where, also for port 0.
    uvicorn.run(app, host=ADDRESS, port=args.port, access_log=False, log_level="info")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
