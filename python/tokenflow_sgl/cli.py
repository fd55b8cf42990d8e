"""The command `tokenflow`: one entry to what the package does.

Owns the subcommands; each imports what it needs when it is called. Invariant: exit status 0 means done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """`tokenflow serve ...`, `bench ...`, `sim ...`, `size ...`, `dash ...`, `replay JOURNAL` and `doctor`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["serve"]:
        # All flags after `serve` are the server's own, --help included.
        from .launch_server import main as serve

        serve(argv[1:])
        return 0
    if argv[:1] == ["bench"]:
        from .bench.run import main as bench

        return bench(argv[1:])
    if argv[:1] == ["sim"]:
        from .bench.simulate import main as sim

        return sim(argv[1:])
    if argv[:1] == ["size"]:
        from .bench.size import main as size

        return size(argv[1:])
    if argv[:1] == ["dash"]:
        from .dashboard.serve import main as dash

        return dash(argv[1:])
    parser = argparse.ArgumentParser(prog="tokenflow", description="SGLang with buffer-aware preemptive scheduling")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="same as python -m tokenflow_sgl.launch_server", add_help=False)
    commands.add_parser("bench", help="same as python -m tokenflow_sgl.bench.run", add_help=False)
    commands.add_parser("sim", help="same as python -m tokenflow_sgl.bench.simulate", add_help=False)
    commands.add_parser("size", help="same as python -m tokenflow_sgl.bench.size", add_help=False)
    commands.add_parser("dash", help="the live page of a server", add_help=False)
    commands.add_parser("doctor", help="check this SGLang against what we use of it; 0 if the server can start")
    replay = commands.add_parser(
        "replay", help="run a journal through its policy; fails at the first plan that differs"
    )
    replay.add_argument("journal", help="file written by --tokenflow-journal")
    args = parser.parse_args(argv)
    return _doctor() if args.command == "doctor" else _replay(args.journal)


def _doctor() -> int:
    from .adapter import hooks

    problems = hooks.check()
    print(f"SGLang {hooks.installed_release()}: {len(hooks.USES)} uses of it checked, {len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _replay(path: str) -> int:
    from .core.journal import replay
    from .core.policies import policy_from_header

    try:
        agreed, difference = replay(path, policy_from_header)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"tokenflow replay: {path}: {error}", file=sys.stderr)
        return 2
    if difference is not None:
        print(f"{path}: {agreed} steps agree, then {difference}", file=sys.stderr)
        return 1
    print(f"{path}: {agreed} steps, all plans agree")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
