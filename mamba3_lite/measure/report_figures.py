"""The curves of a report: one figure a quantity, all runs in it, events marked at its top."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mamba3_lite.measure.html import COLOURS, Draw
from mamba3_lite.measure.run_folder import Run, Series

MAX_POINTS = 600  # of a curve; a screen shows hardly more
_MAX_MARKS = 100  # of one kind of event along the axis
_DOTTED = 40  # a curve of fewer points shows each
_SPIKE_POINTS = 4  # a longer rise is no spike

# What the picture calls an event, and its marker.
MARKS = {
    "nan-guard": ("dropped window", "x"),
    "spike": ("spike", "^"),
    "rollback": ("rollback", "<"),
    "resume": ("resumed", ">"),
    "save-failed": ("save failed", "s"),
}


@dataclass(frozen=True)
class Quantity:
    """A key of the training rows, and how it is drawn.

    Args:
        form: of the numbers at the axis, for ``format``; None: a logarithmic axis.
        clipped: short spikes do not stretch the axis.
    """

    key: str
    label: str
    form: str | None
    clipped: bool = False


LOSS = Quantity("loss", "loss (nat per token)", "{:.4g}", clipped=True)
QUANTITIES = (
    LOSS,
    Quantity("lr", "learning rate", "{:.3g}"),
    Quantity("tps", "tokens per second", "{:,.0f}"),
    Quantity("mfu", "model FLOPs utilisation", "{:.1%}"),
    Quantity("grad_norm", "gradient norm before clipping", None),
    Quantity("peak_mem_gib", "peak memory (GiB)", "{:,.3g}"),
)


@dataclass(frozen=True)
class Curve:
    """The points (n,) that are drawn of one run."""

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def of(cls, series: Series) -> "Curve":
        """All rows, or the lowest and highest of each of MAX_POINTS / 2 equal stretches."""
        x, y = series
        if len(x) <= MAX_POINTS:
            return cls(x, y)
        kept: list[int] = []
        for stretch in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
            finite = stretch[np.isfinite(y[stretch])]
            if len(finite):
                kept += sorted({finite[y[finite].argmin()], finite[y[finite].argmax()]})
            else:
                kept.append(stretch[0])
        return cls(x[kept], y[kept])


@dataclass(frozen=True)
class Figure:
    """A drawing, the name of its file, what there is to say about it, and the legend's height."""

    name: str
    draw: Draw
    caption: str
    legend_rows: int

    @property
    def size_inches(self) -> tuple[float, float]:
        """Of a phone's width, so that its text is read there at its own size."""
        return 3.8, 2.6 + 0.16 * self.legend_rows


def figures(runs: Sequence[Run]) -> list[Figure]:
    """One for each quantity that any run has a finite value of; the first explains the marks."""
    found = [q for q in QUANTITIES if any(np.isfinite(run.series(q.key)[1]).any() for run in runs)]
    return [_figure(q, runs, explained=q is found[0]) for q in found]


def thinned(runs: Sequence[Run]) -> list[str]:
    """Which runs have more rows than are drawn, and how many."""
    counts = [(run, len(run.series(LOSS.key)[0])) for run in runs]
    return [f"{count:,} of {run.name}" for run, count in counts if count > MAX_POINTS]


def _figure(quantity: Quantity, runs: Sequence[Run], *, explained: bool) -> Figure:
    curves = [Curve.of(run.series(quantity.key)) for run in runs]
    key = "val_loss" if quantity is LOSS else None
    validation = [] if key is None else [Curve.of(run.series(key)) for run in runs]
    every = [curve for curve in (*curves, *validation) if np.isfinite(curve.y).any()]
    limits = _limits(every) if quantity.clipped else None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            dot = "." if len(curve.x) < _DOTTED else None
            axes.plot(curve.x, curve.y, **_style(number), lw=1.2, marker=dot, ms=4)
        for number, curve in enumerate(validation):
            axes.plot(curve.x, curve.y, **_validation_style(_colour(number, runs, own=1)))
        for number, run in enumerate(runs):
            ink = axes.xaxis.label.get_color()
            _mark(axes, run, ink if len(runs) == 1 else _colour(number, runs))
        if quantity.form is None:
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_formatter(lambda value, _: quantity.form.format(value))
        axes.set_ylim(limits)
        axes.set(xlabel="optimizer step", ylabel=quantity.label)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", integer=True, nbins=5)
        if entries:
            _draw_legend(figure, entries, columns)

    entries = _legend(runs, validated=any(len(c.x) for c in validation), marks=explained)
    columns = 1 if any(len(label) > 18 for label, _ in entries) else 2
    caption = _caption(quantity, runs, curves, every, limits)
    return Figure(quantity.key, draw, caption, math.ceil(len(entries) / columns))


def _style(number: int) -> dict[str, Any]:
    """Of the curve of a run: colours come again, then dashed."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "ls": "-" if number < len(COLOURS) else "--",
    }


def _colour(number: int, runs: Sequence[Run], *, own: int = 0) -> str:
    """A run's colour; where there is only one run, colour number ``own``."""
    return COLOURS[(own if len(runs) == 1 else number) % len(COLOURS)]


def _validation_style(colour: str) -> dict[str, Any]:
    return {"color": colour, "ls": ":", "marker": "o", "ms": 3.5}


def _limits(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Where an axis ends that short spikes would stretch; None where none would.

    Neither a start far above the rest nor a rise that stays is a spike.
    """
    finite = [curve.y[np.isfinite(curve.y)] for curve in curves]
    low, high = min(y.min() for y in finite), max(y.max() for y in finite)
    usual = max(max(y[:_SPIKE_POINTS].max(), _medians(y).max()) for y in finite)
    if not 0 < 3 * (usual - low) < high - low:
        return None
    margin = (usual - low) / 8
    return float(low - margin), float(usual + margin)


def _medians(y: np.ndarray) -> np.ndarray:
    """Of every stretch of points (n,) more than twice as long as a spike."""
    length = min(len(y), 2 * _SPIKE_POINTS + 1)
    return np.median(np.lib.stride_tricks.sliding_window_view(y, length), axis=-1)


def _mark(axes: Any, run: Run, colour: str) -> None:
    """A mark at the top for each event, and a line down where the curve starts anew."""
    for kind in {event.kind: None for event in run.events}:
        steps = np.array([event.opt_step for event in run.events if event.kind == kind])
        # Marks closer than the eye tells apart would only make the file large.
        cell = max(1, (steps.max() - steps.min()) // _MAX_MARKS)
        steps = steps[np.unique(steps // cell, return_index=True)[1]]
        axes.plot(
            steps, np.ones(len(steps)), transform=axes.get_xaxis_transform(), clip_on=False,
            color=colour, marker=_mark_of(kind)[1], ms=5, ls="",
        )  # fmt: skip
        if kind in ("rollback", "resume"):
            for opt_step in steps:
                axes.axvline(opt_step, color=colour, lw=0.6, alpha=0.5)


def _mark_of(kind: str) -> tuple[str, str]:
    return MARKS.get(kind, (kind, "d"))


def _legend(
    runs: Sequence[Run], *, validated: bool, marks: bool
) -> list[tuple[str, dict[str, Any]]]:
    """(label, style) of runs if there are several, and of what lines and marks mean.

    A style without a colour is drawn in that of the text; a plain figure needs no entry.
    """
    one = len(runs) == 1
    found = [] if one else [(run.name, _style(number)) for number, run in enumerate(runs)]
    if validated:
        style = _validation_style(COLOURS[1])
        if one:
            found.append(("training", _style(0)))
        else:
            del style["color"]
        found.append(("validation", style))
    kinds = {event.kind: None for run in runs for event in run.events} if marks else {}
    for label, marker in map(_mark_of, kinds):
        found.append((label, {"ls": "", "marker": marker, "ms": 5}))
    return [(_as_label(label), style) for label, style in found]


def _draw_legend(figure: Any, entries: list[tuple[str, dict[str, Any]]], columns: int) -> None:
    from matplotlib import rcParams
    from matplotlib.lines import Line2D

    ink = {"color": rcParams["text.color"]}
    handles = [Line2D([], [], label=label, **(ink | style)) for label, style in entries]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)


def _as_label(name: str) -> str:
    """Short, and with nothing that matplotlib would take for mathematics or for 'no label'."""
    short = name if len(name) <= 32 else f"...{name[-29:]}"
    return short.replace("$", r"\$").removeprefix("_") or " "


def _caption(
    quantity: Quantity,
    runs: Sequence[Run],
    curves: Sequence[Curve],
    every: Sequence[Curve],
    limits: tuple[float, float] | None,
) -> str:
    said = [quantity.label[0].upper() + quantity.label[1:] + "."]
    without = [r.name for r, c in zip(runs, curves, strict=True) if not np.isfinite(c.y).any()]
    if without:
        said.append(f"No value of {', '.join(without)}.")
    if limits is not None:
        y = np.concatenate([curve.y for curve in every])
        over = y[np.isfinite(y) & (y > limits[1])]
        points = "1 point lies" if len(over) == 1 else f"{len(over)} points lie"
        said.append(f"{points} above the picture, the highest at {over.max():.4g}.")
    return " ".join(said)
