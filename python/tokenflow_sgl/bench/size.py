"""`tokenflow size`: what one GPU serves within a service level, what memory that takes, and the flags to use.

Owns the command, its table and its plot. Searches nothing itself (sim/size.py). Invariant: every number printed is of
a simulated run that is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenflow_sgl.bench.outputs import check_file, check_folder
from tokenflow_sgl.sim.hardware import Hardware, Model, list_hardware, list_models, load_hardware, load_model
from tokenflow_sgl.sim.run import SimulationStuck
from tokenflow_sgl.sim.size import Demand, Level, Point, Size, size_gpu

POLICIES = ("sglang-fcfs", "tokenflow")
_MEM_FRACTION = 0.85


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 if no rate meets the level, 2 for bad input, 130 when interrupted."""
    args = _parser().parse_args(argv)
    try:
        return _size(args)
    except KeyboardInterrupt:
        print("tokenflow size: interrupted", file=sys.stderr)
        return 130
    except (ValueError, SimulationStuck) as error:
        print(f"tokenflow size: {error}", file=sys.stderr)
        return 2


def _size(args: argparse.Namespace) -> int:
    """Raises ValueError for bad input, SimulationStuck."""
    hardware, model = load_hardware(args.gpu), load_model(args.model)
    demand = Demand(args.read_rate, args.prompt_tokens, args.answer_tokens)
    level = Level(args.ttft_p99, args.stalled)
    _check(args)
    path = None if args.json in (None, "-") else check_file(args.json, field="json")
    if args.plot is not None:
        check_folder(args.plot, field="plot")
    sizes = [
        size_gpu(hardware, model, demand, level, policy=p, mem_fraction=args.mem_fraction, report=_say)
        for p in POLICIES
    ]
    found = json.dumps(_json(sizes, args), indent=1, allow_nan=False)
    print(found if args.json == "-" else text(sizes, hardware, model, args))
    if path is not None:
        path.write_text(found + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(sizes, level, args.plot / f"size-{hardware.name}-{model.name}.png")
    return 0 if sizes[-1].best is not None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenflow size", description="Streams per GPU within a service level.")
    parser.add_argument("--model", required=True, help=f"{', '.join(list_models())}, or a config.json of a dense model")
    parser.add_argument("--gpu", required=True, help=", ".join(list_hardware()))
    parser.add_argument("--read-rate", type=float, default=6.0, help="tokens a second of a reader (default 6)")
    parser.add_argument("--arrivals", type=float, help="requests a second in all; then the number of GPUs is told")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="mean (default 512)")
    parser.add_argument("--answer-tokens", type=int, default=512, help="mean (default 512)")
    parser.add_argument("--ttft-p99", type=float, default=1.0, help="P99 TTFT at most, s (default 1)")
    parser.add_argument("--stalled", type=float, default=0.01, help="share of requests that may stall (default 0.01)")
    parser.add_argument("--mem-fraction", type=float, default=_MEM_FRACTION, help="(weights + KV) / GPU memory")
    parser.add_argument("--json", metavar="FILE", help="write the sizes as JSON; - prints them instead of the table")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a plot here")
    return parser


def _check(args: argparse.Namespace) -> None:
    for name, value, low, high in (
        ("read-rate", args.read_rate, 0.1, 1000.0),
        ("arrivals", args.arrivals, 1e-6, 1e6),
        ("prompt-tokens", args.prompt_tokens, 1, 1_000_000),
        ("answer-tokens", args.answer_tokens, 1, 1_000_000),
        ("ttft-p99", args.ttft_p99, 0.001, 3600.0),
        ("stalled", args.stalled, 0.0, 1.0),
        ("mem-fraction", args.mem_fraction, 0.01, 0.99),
    ):
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name}: {value}, valid: {low:g} to {high:g}")


def _say(policy: str, point: Point) -> None:
    print(
        f"{policy}: {point.per_s:.2f} req/s: P99 TTFT {point.ttft_p99_s:.2f} s, stalled {point.stalled:.1%}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def text(sizes: Sequence[Size], hardware: Hardware, model: Model, args: argparse.Namespace) -> str:
    """The table, and the flags of the last policy."""
    pool = sizes[-1].pool_tokens
    gib = model.kv_bytes_per_token / 2**30
    lines = [
        f"{model.name} on {hardware.name}, {args.prompt_tokens} + {args.answer_tokens} tokens, readers of "
        f"{args.read_rate:g} tok/s; P99 TTFT <= {args.ttft_p99:g} s, at most {args.stalled:.1%} of requests stall",
        f"KV pool {pool} tokens, {pool * gib:.1f} GiB of GPU memory",
        f"{'policy':14}{'req/s':>8}{'streams':>9}{'running':>9}{'P99 TTFT':>10}{'stalled':>9}{'host GiB':>10}"
        + (f"{'GPUs':>6}" if args.arrivals else ""),
    ]
    for size in sizes:
        p = size.best
        if p is None:
            lines.append(f"{size.policy:14}  no rate meets the level")
            continue
        gpus = f"{math.ceil(args.arrivals / p.per_s):>6}" if args.arrivals else ""
        lines.append(
            f"{size.policy:14}{p.per_s:>8.2f}{p.most_streams:>9}{p.most_running:>9}{p.ttft_p99_s:>9.2f}s"
            f"{p.stalled:>9.1%}{p.most_host_tokens * gib:>10.1f}{gpus}"
        )
    best = sizes[-1].best
    if best is not None:
        host_gib = max(1, math.ceil(1.25 * best.most_host_tokens * gib))
        lines.append(
            f"flags: --mem-fraction-static {args.mem_fraction:g} --max-running-requests {best.most_running} "
            f"--hicache-size {host_gib} --tokenflow-default-read-rate {args.read_rate:g}"
        )
    return "\n".join(lines)


def _json(sizes: Sequence[Size], args: argparse.Namespace) -> dict[str, Any]:
    asked = {k: v for k, v in vars(args).items() if k not in ("json", "plot")}
    finite = [
        {
            **asdict(s),
            "points": [
                {**asdict(p), "ttft_p99_s": p.ttft_p99_s if math.isfinite(p.ttft_p99_s) else None} for p in s.points
            ],
        }
        for s in sizes
    ]
    return {"asked": asked, "sizes": finite}


def draw(sizes: Sequence[Size], level: Level, path: Path) -> None:
    """P99 TTFT and the share that stalls over the arrival rate, policy by policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (waits, stalled) = plt.subplots(1, 2, figsize=(9, 3.5))
    for size in sizes:
        points = [p for p in size.points if math.isfinite(p.ttft_p99_s)]
        waits.plot([p.per_s for p in points], [p.ttft_p99_s for p in points], marker=".", label=size.policy)
        stalled.plot([p.per_s for p in points], [p.stalled for p in points], marker=".", label=size.policy)
    waits.axhline(level.ttft_p99_s, color="gray", linestyle="--", linewidth=1)
    stalled.axhline(level.stalled, color="gray", linestyle="--", linewidth=1)
    waits.set_yscale("log")
    waits.set_ylabel("P99 TTFT, s")
    stalled.set_ylabel("share of requests that stall")
    for panel in (waits, stalled):
        panel.set_xlabel("requests a second")
        panel.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
