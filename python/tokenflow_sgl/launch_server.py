"""python -m tokenflow_sgl.launch_server: SGLang's server with TokenFlow on; every upstream flag, plus --tokenflow-*.

Owns the switch and the start; parses nothing itself. Invariant: it serves with our scheduler in force, or not at all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until stopped. Raises SystemExit with a message when TokenFlow cannot be in force or a flag is wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Children are spawned: the environment is all they inherit before their plugins load.
    os.environ["TOKENFLOW_ENABLE"] = "1"
    if "--tokenflow-allow-untested" in argv:
        # Read here, and not from the parsed flags: the release is judged before there is a parser to ask.
        os.environ["TOKENFLOW_ALLOW_UNTESTED"] = "1"

    from sglang.srt.plugins import load_plugins

    from tokenflow_sgl.adapter import plugin

    load_plugins()
    plugin.verify_in_force()

    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(argv)
    from sglang.srt.entrypoints import http_server

    try:
        http_server.launch_server(server_args, run_scheduler_process_func=plugin.run_scheduler_process)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
