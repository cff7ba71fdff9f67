"""The curves of a report: one figure a quantity, all runs in it, events marked at its top."""

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
    Quantity("lr", "learning rate", "{:.2g}"),
    Quantity("tps", "tokens per second", "{:,.0f}"),
    Quantity("mfu", "model FLOPs utilisation", "{:.1%}"),
    Quantity("grad_norm", "gradient norm before clipping", None),
    Quantity("peak_mem_gib", "peak memory (GiB)", "{:,.3g}"),
)


@dataclass(frozen=True)
class Curve:
    """What is drawn of one run: points (n,), and how many rows they stand for."""

    x: np.ndarray
    y: np.ndarray
    rows: int

    @classmethod
    def of(cls, series: Series) -> "Curve":
        """All rows, or the lowest and highest of each of MAX_POINTS / 2 equal stretches."""
        x, y = series
        if len(x) <= MAX_POINTS:
            return cls(x, y, len(x))
        kept: list[int] = []
        for stretch in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
            finite = stretch[np.isfinite(y[stretch])]
            if len(finite):
                kept += sorted({finite[y[finite].argmin()], finite[y[finite].argmax()]})
            else:
                kept.append(stretch[0])
        return cls(x[kept], y[kept], len(x))


@dataclass(frozen=True)
class Figure:
    """A drawing, the name of its file, and what there is to say about it."""

    name: str
    draw: Draw
    caption: str


def figures(runs: Sequence[Run]) -> list[Figure]:
    """One for each quantity that any run has a finite value of."""
    return [_figure(quantity, runs) for quantity in QUANTITIES if _has(runs, quantity.key)]


def _has(runs: Sequence[Run], key: str) -> bool:
    return any(np.isfinite(run.series(key)[1]).any() for run in runs)


def _figure(quantity: Quantity, runs: Sequence[Run]) -> Figure:
    curves = [Curve.of(run.series(quantity.key)) for run in runs]
    key = "val_loss" if quantity is LOSS else None
    validation = [] if key is None else [Curve.of(run.series(key)) for run in runs]
    every = [*curves, *validation]
    top = _top(every) if quantity.clipped else None

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
        axes.set_ylim(top=top)
        axes.set(xlabel="optimizer step", ylabel=quantity.label)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", integer=True, nbins=6)
        handles = _legend(runs, validated=any(len(curve.x) for curve in validation))
        if handles:
            figure.legend(handles=handles, loc="outside lower left", ncols=2)

    return Figure(quantity.key, draw, _caption(quantity, runs, curves, every, top))


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


def _top(curves: Sequence[Curve]) -> float | None:
    """Where an axis ends that short spikes would stretch; None where none would.

    Neither a start far above the rest nor a rise that stays is a spike.
    """
    finite = [curve.y[np.isfinite(curve.y)] for curve in curves]
    finite = [y for y in finite if len(y)]
    low, high = min(y.min() for y in finite), max(y.max() for y in finite)
    usual = max(max(y[:_SPIKE_POINTS].max(), _medians(y).max()) for y in finite)
    return float(usual + (usual - low) / 4) if 0 < 3 * (usual - low) < high - low else None


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


def _legend(runs: Sequence[Run], *, validated: bool) -> list[Any]:
    """Runs by colour if there are several, then what lines and marks mean; none if it is plain."""
    from matplotlib import rcParams
    from matplotlib.lines import Line2D

    def entry(label: str, **style: Any) -> None:
        handles.append(Line2D([], [], label=_as_label(label), **style))

    handles: list[Any] = []
    ink, one = rcParams["text.color"], len(runs) == 1
    if not one:
        for number, run in enumerate(runs):
            entry(run.name, **_style(number))
    elif validated:
        entry("training", **_style(0))
    if validated:
        entry("validation", **_validation_style(COLOURS[1] if one else ink))
    for kind in {event.kind: None for run in runs for event in run.events}:
        label, marker = _mark_of(kind)
        entry(label, color=ink, ls="", marker=marker, ms=5)
    return handles


def _as_label(name: str) -> str:
    """Short, and with nothing that matplotlib would take for mathematics or for 'no label'."""
    short = name if len(name) <= 32 else f"...{name[-29:]}"
    return short.replace("$", r"\$").removeprefix("_") or " "


def _caption(
    quantity: Quantity,
    runs: Sequence[Run],
    curves: Sequence[Curve],
    every: Sequence[Curve],
    top: float | None,
) -> str:
    said = [quantity.label[0].upper() + quantity.label[1:] + "."]
    for run, curve in zip(runs, curves, strict=True):
        of = "" if len(runs) == 1 else f" of {run.name}"
        if not np.isfinite(curve.y).any():
            said.append(f"No value{of}.")
        if len(curve.x) < curve.rows:
            said.append(
                f"{curve.rows:,} rows{of} thinned to {len(curve.x):,} points: the lowest and the "
                "highest of equal stretches."
            )
    if top is not None:
        y = np.concatenate([curve.y for curve in every])
        over = y[np.isfinite(y) & (y > top)]
        points = "1 point lies" if len(over) == 1 else f"{len(over)} points lie"
        said.append(f"{points} above the picture, the highest at {over.max():.4g}.")
    return " ".join(said)
