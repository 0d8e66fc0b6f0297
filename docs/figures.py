"""Draw metrics of runs for the documentation.

    python docs/figures.py docs/figures/demo_reward.svg reward/mean examples/runs/quickstart [RUN ...]

Several metrics are separated by commas; each metric of each run is a line. Needs requirements/docs.lock.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "braid",  # the same file for the same run
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=["#00897b", "#d81b60", "#1e88e5", "#fb8c00", "#8e24aa"]),
    # legible on a light and on a dark page
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808080"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("metrics", help="metric, or several separated by commas")
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    metrics = args.metrics.split(",")
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(4.6, 2.4), layout="constrained")
        for run in args.runs:
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for metric in metrics:
                points = [(line["round"], line[metric]) for line in lines if metric in line]
                if not points:
                    raise SystemExit(f"{run} has no metric {metric}")
                axes.plot(*zip(*points, strict=True), label=run.name if len(metrics) == 1 else metric)
        axes.set(xlabel="round", title=", ".join(metrics))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.grid(alpha=0.2)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
        figure.savefig(args.output, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
