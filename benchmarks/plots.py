"""Pictures of results.

    python benchmarks/plots.py benchmarks/results/ssd_operator.jsonl operator.png

A file holds rows of one benchmark; of several rows of one thing the last counts.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows

BLUE, ORANGE, GREY = "#4878a8", "#d1703c", "#777777"
PASSES = (("forward", "forward", BLUE), ("forward_backward", "forward + backward", ORANGE))


def loss_curves(row: dict[str, Any], figure: Any) -> None:
    """All curves, and below them the paired differences beside what they are held to."""
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference, candidate = row["reference"], row["candidate"]
    for dispatch, colour in ((reference, BLUE), (candidate, ORANGE)):
        for index, curve in enumerate(row["curves"][dispatch].values()):
            label = f"{dispatch}, each seed" if index == 0 else None
            losses.plot(*zip(*curve, strict=True), color=colour, lw=0.8, alpha=0.8, label=label)
    for seed, curve in row["curves"][candidate].items():
        other = dict(map(tuple, row["curves"][reference][seed]))
        both = [(opt_step, loss - other[opt_step]) for opt_step, loss in curve if opt_step in other]
        differences.plot(*zip(*both, strict=True), lw=0.8, label=f"seed {seed}")
    limit, spread = row["limit_nat"], row["spread_nat"][reference]
    differences.axhspan(-limit, limit, color=GREY, alpha=0.2, label=f"limit, {limit} nat")
    for sign in (-1, 1):
        label = f"spread between seeds, {spread:.4f} nat" if sign > 0 else None
        differences.axhline(sign * spread, color=GREY, ls="--", lw=1, label=label)
    first, last = row["compared_opt_steps"]
    differences.axvspan(first, last, color=BLUE, alpha=0.08, label="compared")
    height = 4 * max(limit, spread)
    differences.set(
        xlabel="optimizer step", ylabel=f"{candidate} - {reference} (nat)", ylim=(-height, height)
    )
    losses.set(ylabel="training loss (nat per token)")
    losses.set_title(
        f"{row['parameters'] / 1e6:.0f} M parameters: mean difference "
        f"{row['mean_nat']:+.4f} ± {row['standard_error_nat']:.4f} nat"
    )
    for axes in (losses, differences):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, ncols=2)


# The runs of each panel; "base" is in all.
PANELS = {
    "peak learning rate": ("lr 1.5e-4", "lr 6e-4", "lr 1.2e-3", "lr 1e-2"),
    "warm-up, optimizer steps": ("warm-up 0", "warm-up 500"),
    "floor, min_lr_ratio": ("floor 0", "floor 0.5"),
    "what changes nothing": ("chunk 64", "chunk 128", "seed 1"),
}
SMOOTHED_ROWS = 10


def tuning_curves(found: list[dict[str, Any]], figure: Any) -> None:
    """The knobs of learning, a panel each; a point is the mean of some rows."""
    runs = {row["name"]: row for row in found}
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name in ("base", *names):
            if name not in runs or len(runs[name]["curve"]) < SMOOTHED_ROWS:
                continue
            curve = runs[name]["curve"]
            pieces = [
                curve[i : i + SMOOTHED_ROWS]
                for i in range(0, len(curve) - SMOOTHED_ROWS + 1, SMOOTHED_ROWS)
            ]
            where = [piece[-1][0] for piece in pieces]
            losses = [sum(loss for _, loss in piece) / SMOOTHED_ROWS for piece in pieces]
            style = {"color": GREY, "lw": 1.6} if name == "base" else {"lw": 1}
            axes.plot(where, losses, label=name, **style)
        axes.set(title=title, xlabel="optimizer step", ylabel="training loss (nat per token)")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)


def ssd_operator(found: list[dict[str, Any]], figure: Any) -> None:
    """Bandwidth of the fused operator by length and by batch; milliseconds of all at one shape."""
    by_length, by_batch, bars = figure.subplots(1, 3, width_ratios=(3, 2, 3))
    latest = {(r["path"], r["batch"], r["seq_len"]): r for r in found}
    fused = [r for r in latest.values() if r["path"] == "fused"]
    long = [r for r in fused if r["batch"] == max(1, 32768 // r["seq_len"])]
    short = [r for r in fused if r["seq_len"] == 2048]
    for axes, chosen, key, label in (
        (by_length, long, "seq_len", "length (32,768 tokens or more)"),
        (by_batch, short, "batch", "batch (length 2048)"),
    ):
        for name, title, colour in PASSES:
            points = sorted((r[key], r[name]["gb_per_sec"]) for r in chosen if r[name])
            if points:
                axes.plot(*zip(*points, strict=True), "o-", ms=4, color=colour, label=title)
        copy = max(r["copy_gb_per_sec"] for r in fused)
        axes.axhline(copy, color=GREY, ls="--", lw=1, label="device copy")
        axes.set_xscale("log", base=2)
        axes.set(xlabel=label, ylabel="GB/s of the floor's bytes", ylim=(0, None))
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    _bars([r for r in latest.values() if (r["batch"], r["seq_len"]) == (16, 2048)], bars)


def _bars(found: list[dict[str, Any]], axes: Any) -> None:
    """Medians of every path and peer, as an ordinary call takes them."""
    times = {
        r["path"]: {name: r[name]["eager_ms"]["median"] for name, _, _ in PASSES} for r in found
    }
    for row in found:
        times |= row.get("peers", {}).get("times_ms", {})
    for index, (name, title, colour) in enumerate(PASSES):
        where = [place + 0.4 * index for place in range(len(times))]
        values = [both[name] for both in times.values()]
        drawn = axes.barh(where, values, height=0.38, color=colour, label=title)
        axes.bar_label(drawn, [f"{value:.2f}" for value in values], fontsize=8, padding=2)
    axes.set_yticks([place + 0.2 for place in range(len(times))], list(times), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="ms at batch 16, length 2048")
    axes.legend(fontsize=8)


def draw(results: Path, target: Path) -> None:
    """Draws the benchmark that a results file holds, where matplotlib is installed.

    Elsewhere it says so and draws nothing: the rows have all that it needs.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no matplotlib, no {target}: draw {results} elsewhere", file=sys.stderr)
        return
    found = rows.read(results)
    name = found[-1]["benchmark"]
    if name == "loss_curves":
        figure = Figure(figsize=(8, 6.5), layout="constrained")
        loss_curves(found[-1], figure)
    elif name == "ssd_operator":
        figure = Figure(figsize=(13, 4), layout="constrained")
        ssd_operator(found, figure)
    elif name == "tuning_curve":
        figure = Figure(figsize=(11, 7), layout="constrained")
        tuning_curves(found, figure)
    else:
        sys.exit(f"{results}: no picture is known for {name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("results", type=Path)
    ap.add_argument("picture", type=Path)
    args = ap.parse_args()
    draw(args.results, args.picture)


if __name__ == "__main__":
    main()
