"""Plots of simulated results: one figure a scenario.

Owns the drawing. Computes no measure. Invariant: every bar is a median over seeds, with its spread as a line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PANELS = (
    ("P99 TTFT, s (log)", "ttft_p99_s", True),
    ("stall total, s", "stall_total_s", False),
    ("effective throughput, tok/s", "effective_throughput_tok_s", False),
    ("effective goodput, tok/s", "effective_goodput_tok_s", False),
    ("raw throughput, tok/s", "raw_throughput_tok_s", False),
)


def bars(found: Mapping[str, Any], path: Path) -> None:
    """found: the JSON of results.rows_json. Policies are rows, measures are panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(found["results"])
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3.2 * len(PANELS), 0.9 + 0.32 * len(names)), sharey=True)
    for panel, (title, key, log) in zip(axes, PANELS, strict=True):
        rows = [[r[key] for r in found["results"][name]["per_seed"] if r[key] is not None] for name in names]
        medians = [found["results"][name][key] for name in names]
        most = max([v for row in rows for v in row if math.isfinite(v)], default=1.0)
        for i, (name, row, median) in enumerate(zip(names, rows, medians, strict=True)):
            if median is None:
                continue
            failed = math.isinf(median)
            color = "tab:red" if failed else "tab:blue" if name == "tokenflow" else "tab:gray"
            panel.barh(i, most if failed else median, color=color)
            if failed:
                panel.text(most, i, "failed ", ha="right", va="center", fontsize=7, color="white")
            else:
                panel.plot([min(row), min(max(row), most)], [i, i], color="black", linewidth=1)
        if log and any(m for m in medians):
            panel.set_xscale("log")
        panel.set_title(title, fontsize=9)
        panel.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.suptitle(f"{found['scenario']}, simulated, seeds {found['seeds']}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
