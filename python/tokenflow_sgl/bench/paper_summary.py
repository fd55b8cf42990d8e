"""The paper's one page: a table a scenario, in Markdown.

Owns the columns. Computes no measure. Invariant: every number is a median over the seeds that were run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenflow_sgl.workload.scenario import Scenario

SUMMARY: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("P99 TTFT s", "ttft_p99_s", lambda v: f"{v:.2f}"),
    ("stall total s", "stall_total_s", lambda v: f"{v:.0f}"),
    ("effective throughput tok/s", "effective_throughput_tok_s", lambda v: f"{v:.0f}"),
    ("effective goodput tok/s", "effective_goodput_tok_s", lambda v: f"{v:.0f}"),
    ("raw throughput tok/s", "raw_throughput_tok_s", lambda v: f"{v:.0f}"),
    ("QoE", "qoe_mean", lambda v: f"{v:.3f}"),
    ("mean completion s", "completion_mean_s", lambda v: f"{v:.1f}"),
)


def summary(everything: Mapping[str, dict[str, Any]], scenarios: Mapping[str, Scenario]) -> str:
    """Markdown: one table a scenario, medians over seeds, the best of each column in bold."""
    lines = ["# Scenarios x policies, simulated", ""]
    for name, found in everything.items():
        bounds = found["bounds"]
        lines += [
            f"## {name}", "", scenarios[name].about + f"; seeds {found['seeds']}. Bounds: P99 TTFT >= "
            f"{bounds['ttft_p99_s']:.2f} s, effective goodput <= {bounds['effective_goodput_tok_s']:.0f} tok/s.", "",
            "| policy | runs | failed requests | " + " | ".join(title for title, _, _ in SUMMARY) + " | parks |",
            "|---" * (len(SUMMARY) + 4) + "|",
        ]  # fmt: skip
        best = {key: _best(found, key) for _, key, _ in SUMMARY}
        for policy, asked in found["asked"].items():
            row = found["results"].get(policy)
            if row is None:
                lines.append(f"| {policy} | 0 of {asked} |" + " - |" * (len(SUMMARY) + 2))
                continue
            runs = len(row["per_seed"])
            cells = []
            for _, key, form in SUMMARY:
                value = row[key]
                text = "-" if value is None else form(value)
                cells.append(f"**{text}**" if value is not None and text == best[key] else text)
            runs_text = f"{runs}" if runs == asked else f"{runs} of {asked}"
            lines.append(
                f"| {policy} | {runs_text} | {row['failed']} | " + " | ".join(cells) + f" | {row['parks']:g} |"
            )
        lines.append("")
    return "\n".join(lines)


def _best(found: dict[str, Any], key: str) -> str:
    form = next(form for _, name, form in SUMMARY if name == key)
    values = [row[key] for row in found["results"].values() if row[key] is not None]
    if not values:
        return ""
    least = key in ("ttft_p99_s", "stall_total_s", "completion_mean_s")
    return form(min(values) if least else max(values))
