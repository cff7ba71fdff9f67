"""How a comparison is shown: the table, the picture, and one HTML page with both."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mamba3_lite.measure import html
from mamba3_lite.measure.ab_verdict import LOSS_LIMIT_NAT, Comparison, Run
from mamba3_lite.measure.stats import Estimate

GREY = "#888888"
_PANEL_INCHES = 2.4


def by_arm(experiment: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Finished runs of each arm in order of their repeats, without failed ones."""
    found: dict[str, list[Run]] = {name: [] for name in experiment["arms"]}
    for run in sorted(runs, key=lambda run: run["repeat"]):
        if run["failed"] is None:
            found[run["arm"]].append(run)
    return found


def table(
    experiment: Mapping[str, Any], runs: Sequence[Run], comparisons: Sequence[Comparison]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text, a column for each arm; what is not known is a dash."""
    protocol, (first, *_) = experiment["protocol"], experiment["arms"]
    loss = "loss" if protocol["throughput"] else f"loss@{protocol['loss_at']}"
    names = (
        experiment["key"] or "identical", "path", "tok/s", f"against {first}", loss,
        f"against {first}", "peak GiB", f"against {first}", "first micro-step", "runs",
    )  # fmt: skip
    compared = {one.arm: one for one in comparisons}
    columns = []
    for name, finished in by_arm(experiment, runs).items():
        arm, one = experiment["arms"][name], compared.get(name)
        path = arm["backend"] if arm["compile"] is None else f"{arm['backend']}, {arm['compile']}"
        shown = ["-"] * 7
        if finished:
            shown = [
                f"{_mean(finished, 'tps'):,.0f}",
                _interval(one.speed_percent if one else None, "+z.1f", " %"),
                f"{_mean(finished, 'loss'):.4f}",
                _interval(one.loss_nat if one else None, "+z.4f"),
                f"{_mean(finished, 'peak_mem_gib'):.2f}",
                _interval(one.peak_mem_gib if one else None, "+z.2f"),
                # The first repeat found an empty compile cache.
                f"{finished[0]['first_micro_step_sec']:.1f} s",
            ]
        failed = sum(run["arm"] == name and run["failed"] is not None for run in runs)
        count = str(len(finished)) + (f", {failed} failed" if failed else "")
        columns.append([arm["value"], path, *shown, count])
    return ["", *experiment["arms"]], [list(row) for row in zip(names, *columns, strict=True)]


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.fmean(run[name] for run in runs)


def _interval(found: Estimate | None, style: str, unit: str = "") -> str:
    if found is None:
        return "-"
    return f"{found.mean:{style}}{unit} [{found.low:{style}}, {found.high:{style}}]"


class Picture:
    """Speed, loss, loss difference and memory, one below the other: readable on a phone."""

    def __init__(
        self,
        experiment: Mapping[str, Any],
        runs: Sequence[Run],
        comparisons: Sequence[Comparison],
    ) -> None:
        self._experiment, self._comparisons = experiment, comparisons
        self._runs = {name: found for name, found in by_arm(experiment, runs).items() if found}
        self._colours = {
            name: html.COLOURS[i % len(html.COLOURS)] for i, name in enumerate(experiment["arms"])
        }
        self._panels = [self._losses, self._memory]
        if comparisons:
            self._panels = [self._speed, self._losses, self._loss_differences, self._memory]

    @property
    def size_inches(self) -> tuple[float, float]:
        return (html.SIZE_INCHES[0], _PANEL_INCHES * len(self._panels))

    def draw(self, figure: Any) -> None:
        for panel, axes in zip(self._panels, figure.subplots(len(self._panels), 1), strict=True):
            panel(axes)

    def _label(self, name: str) -> str:
        return f"{name}: {self._experiment['arms'][name]['value']}"

    def _speed(self, axes: Any) -> None:
        for one in self._comparisons:
            found = one.speed_percent
            axes.errorbar(
                [found.mean], [self._label(one.arm)], color=self._colours[one.arm], fmt="o",
                xerr=[[found.mean - found.low], [found.high - found.mean]], capsize=3,
            )  # fmt: skip
        axes.axvline(0, color=GREY, lw=1)
        axes.margins(y=0.3)
        axes.invert_yaxis()
        reference = self._label(self._comparisons[0].against)
        axes.set(title=f"speed against {reference}", xlabel="% faster, with its interval")

    def _losses(self, axes: Any) -> None:
        for name in self._runs:
            opt_steps, curve = zip(*self._curve(name).items(), strict=True)
            axes.plot(opt_steps, curve, color=self._colours[name], lw=1.2, label=self._label(name))
        axes.set(title="training loss, mean of the repeats", xlabel="optimizer step", ylabel="nat")
        axes.legend()

    def _loss_differences(self, axes: Any) -> None:
        reference = self._comparisons[0].against
        base = self._curve(reference)
        for one in self._comparisons:
            curve = self._curve(one.arm)
            both = [(opt_step, curve[opt_step] - base[opt_step]) for opt_step in curve]
            axes.plot(
                *zip(*both, strict=True), color=self._colours[one.arm], lw=1.2,
                label=self._label(one.arm),
            )  # fmt: skip
        if any(one.loss_check for one in self._comparisons):
            axes.axhspan(-LOSS_LIMIT_NAT, LOSS_LIMIT_NAT, color=GREY, alpha=0.2, label="limit")
        axes.axhline(0, color=GREY, lw=1)
        title = f"loss minus that of {self._label(reference)}"
        axes.set(title=title, xlabel="optimizer step", ylabel="nat")
        axes.legend()

    def _memory(self, axes: Any) -> None:
        labels = [self._label(name) for name in self._runs]
        values = [_mean(found, "peak_mem_gib") for found in self._runs.values()]
        bars = axes.barh(labels, values, height=0.5, color=[self._colours[n] for n in self._runs])
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=2)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set(title="peak memory", xlabel="GiB")

    def _curve(self, name: str) -> dict[int, float]:
        """Loss by optimizer step, mean over the repeats."""
        curves = [dict(map(tuple, run["curve"])) for run in self._runs[name]]
        return {
            opt_step: statistics.fmean(curve[opt_step] for curve in curves)
            for opt_step in curves[0]
        }


def how(experiment: Mapping[str, Any]) -> str:
    """What was done, in a few sentences."""
    p = experiment["protocol"]
    kind = "timed micro-steps only" if p["throughput"] else "training runs"
    return (
        f"Interleaved {kind}, each in a process of its own: {p['opt_steps']:,} optimizer steps, "
        f"a log row every {p['row_opt_steps']}. Speed: median of the last {p['last_rows']} rows "
        f"after the first {p['drop_opt_steps']:,} optimizer steps. Loss: mean of the last "
        f"{p['last_rows']} rows up to optimizer step {p['loss_at']:,}. The runs of one repeat "
        "share seed and data; every repeat has a seed of its own. Intervals at 95 %: Student's t "
        "over the pairs of repeats, or for a single repeat over blocks of rows; with more than two "
        "arms they all hold at once (Bonferroni)."
    )


def page(
    experiment: Mapping[str, Any],
    runs: Sequence[Run],
    comparisons: Sequence[Comparison],
    verdicts: Sequence[str],
) -> str:
    """The whole HTML page."""
    drawing = Picture(experiment, runs, comparisons)
    picture = html.picture(
        drawing.draw, "speed, loss and memory of the arms", size_inches=drawing.size_inches
    )
    each = [
        [
            run["arm"], run["repeat"], run["seed"], run["failed"] or f"{run['tps']:,.0f}",
            "-" if run["failed"] else f"{run['loss']:.4f}", f"{run['wall_sec']:.0f}",
        ]
        for run in runs
    ]  # fmt: skip
    environment = yaml.safe_dump(experiment["environment"], sort_keys=False)
    settings = yaml.safe_dump(experiment["settings"], sort_keys=False)
    return html.page(
        f"A/B: {experiment['key'] or 'identical arms'}",
        [
            ("Verdict", "".join(map(html.paragraph, verdicts))),
            (
                "Arms",
                html.table(*table(experiment, runs, comparisons))
                + html.paragraph(how(experiment), soft=True),
            ),
            ("Picture", picture),
            ("Runs in order", html.table(
                ["arm", "repeat", "seed", "tok/s", "loss", "seconds"], each)),
            ("Command", html.listing(experiment["command"])),
            ("Environment", html.listing(environment)),
            ("Settings of every arm", html.listing(settings)),
        ],
    )  # fmt: skip
