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
        finite = [[v for v in row if math.isfinite(v)] for row in rows]
        medians = [sorted(row)[len(row) // 2] if row else 0.0 for row in finite]
        colors = ["tab:blue" if name == "tokenflow" else "tab:gray" for name in names]
        panel.barh(range(len(names)), medians, color=colors)
        for i, row in enumerate(finite):
            if row:
                panel.plot([min(row), max(row)], [i, i], color="black", linewidth=1)
        if log and any(m > 0 for m in medians):
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
