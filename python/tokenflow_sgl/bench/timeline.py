"""The picture of a burst: what each reader had in its buffer, who waited, who was parked.

Owns the drawing. Computes no measure; buffers come from the raw arrivals (core/qoe.py), never from what a server
believes. Invariant: all servers share both axes, so that they can be compared at a glance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenflow_sgl.bench.results import RunRecord
from tokenflow_sgl.core.qoe import StreamRecord, buffer_tokens, stall_intervals
from tokenflow_sgl.workload.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEP_S = 0.1
BACKGROUND, NEWCOMER, STALL, PARK, RETURN = "#7a9cc6", "#e07b00", "#c1121f", "#3c096c", "#2a9d3a"


def draw(runs: Sequence[RunRecord], scenario: Scenario, path: Path) -> Path:
    """Write a PNG with one row per run (a server each, the same seed) and return its path.

    Above: each stream's client buffer in tokens, with park and return marks where the server reports them. Below: one
    line per stream, orange while it waits for its first token (the tick), red while its reader is stalled.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end_s = max((record.arrivals_s[-1] for run in runs for record in run.records if record.arrivals_s), default=1.0)
    figure, axes = pyplot.subplots(
        2 * len(runs),
        1,
        sharex=True,
        squeeze=False,
        figsize=(12, 0.8 + 4.0 * len(runs)),
        gridspec_kw={"height_ratios": [2.2, 1.0] * len(runs)},
        layout="constrained",
    )
    panels = [row[0] for row in axes]
    peak = 1
    for index, run in enumerate(runs):
        peak = max(peak, _draw_buffers(panels[2 * index], run, scenario, end_s))
        _draw_waits(panels[2 * index + 1], run, scenario, labelled=index == 0)
    for panel in panels[::2]:
        panel.set_ylim(0, peak * 1.08)
    panels[0].set_xlim(0, end_s * 1.01)
    panels[-1].set_xlabel("seconds since the first request was due")
    figure.suptitle(f"{scenario.name}, seed {runs[0].seed}: {scenario.about}", fontsize=11)
    _legend(panels[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_buffers(panel: Axes, run: RunRecord, scenario: Scenario, end_s: float) -> int:
    times = [step * STEP_S for step in range(int(end_s / STEP_S) + 2)]
    peak = 0
    for record in run.records:
        if not record.arrivals_s:
            continue
        new = record.group in scenario.newcomers
        begun = [at_s for at_s in times if at_s >= record.arrivals_s[0]]
        held = buffer_tokens(record, begun)
        panel.plot(begun, held, color=NEWCOMER if new else BACKGROUND, linewidth=0.9, alpha=0.9, zorder=2 + new)
        peak = max(peak, *held, 0)
    for what, marker, color in (("park", "v", PARK), ("return", "^", RETURN)):
        at = [(event["at_s"], _buffer_of(run, event)) for event in run.transitions if event["what"] == what]
        if at:
            when_s, held = zip(*at, strict=True)
            panel.scatter(when_s, held, marker=marker, color=color, s=16, zorder=5, linewidths=0)
    panel.set_ylabel("buffer, tokens")
    panel.grid(axis="y", alpha=0.25)
    panel.set_title(_headline(run, scenario), loc="left", fontsize=10, fontweight="bold")
    return peak


def _draw_waits(panel: Axes, run: RunRecord, scenario: Scenario, *, labelled: bool) -> None:
    rows = sorted(run.records, key=lambda record: (record.group in scenario.newcomers, record.sent_s))
    for row, record in enumerate(rows):
        first_s = record.arrivals_s[0] if record.arrivals_s else None
        if record.failed:
            panel.plot(record.sent_s, row, marker="x", color=STALL, markersize=5, clip_on=False)
        if first_s is not None:
            panel.hlines(row, record.sent_s, first_s, color=NEWCOMER, linewidth=1.4)
            panel.plot(first_s, row, marker="|", color="black", markersize=4, markeredgewidth=0.9)
            panel.hlines(row, first_s, record.arrivals_s[-1], color="#dddddd", linewidth=0.8, zorder=1)
        for begin_s, stop_s in stall_intervals(record):
            panel.hlines(row, begin_s, stop_s, color=STALL, linewidth=1.6, zorder=3)
    panel.set_ylim(len(rows), -1)
    panel.set_yticks([])
    panel.set_ylabel("streams")
    if labelled:
        first_new = next((i for i, record in enumerate(rows) if record.group in scenario.newcomers), 0)
        if first_new < len(rows):
            # x in axes units: in seconds it would lie outside a very short run and squeeze the layout to nothing.
            beside = panel.get_yaxis_transform()
            panel.text(0.004, first_new, "newcomers", color=NEWCOMER, fontsize=9, va="top", transform=beside)


def _legend(panel: Axes) -> None:
    from matplotlib.lines import Line2D

    def line(color: str, label: str, **style: Any) -> Line2D:
        return Line2D([], [], color=color, label=label, **style)

    panel.legend(
        handles=[
            line(BACKGROUND, "earlier streams"),
            line(NEWCOMER, "newcomers (below: waiting for the first token)"),
            line("black", "first token", marker="|", linestyle=""),
            line(STALL, "reader stalled", linewidth=2),
            line(PARK, "parked", marker="v", linestyle=""),
            line(RETURN, "returned", marker="^", linestyle=""),
        ],
        loc="upper left",
        fontsize=8,
        frameon=False,
        ncols=3,
    )


def _buffer_of(run: RunRecord, event: Mapping[str, Any]) -> int:
    record = next((record for record in run.records if _same_stream(record, event)), None)
    return buffer_tokens(record, [event["at_s"]])[0] if record else 0


def _same_stream(record: StreamRecord, event: Mapping[str, Any]) -> bool:
    return bool(event["id"] == record.rid)


def _headline(run: RunRecord, scenario: Scenario) -> str:
    every, new = run.summary(), run.group_summary(scenario.newcomers)
    parts = [
        f"{run.server}:  newcomers' TTFT mean {new['ttft_mean_s']:.2f} s, P99 {new['ttft_p99_s']:.2f} s",
        f"stalls {every['stall_total_s']:.1f} s (longest {every['stall_longest_s']:.1f})",
        f"{every['raw_throughput_tok_s']:.0f} tok/s",
    ]
    if every["failed"]:
        parts.append(f"{every['failed']} FAILED")
    if run.parks is not None:
        parts.append(f"{run.parks} parks")
    return ",  ".join(parts)
