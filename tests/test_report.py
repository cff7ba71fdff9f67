"""The command report: what its page says, what its figures draw, and how both look in a browser."""

import importlib.util
import json
import math
import re
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mamba3_lite.cli import main
from mamba3_lite.errors import UserError
from mamba3_lite.measure import report, report_figures
from mamba3_lite.measure.html import COLOURS
from mamba3_lite.measure.report import add_samples, write_report
from mamba3_lite.measure.report_figures import MAX_POINTS, QUANTITIES, Curve, figures
from mamba3_lite.measure.run_folder import read_run, read_runs
from mamba3_lite.training.config import load_training_config
from mamba3_lite.training.run_record import write_run_record
from tests.browser import CHROMIUM, DESKTOP, PHONE, Browser
from tests.runs import Pretrainer, config, stop_after, write_tokens

START = 1_790_000_000  # a Unix time


def train_row(opt_step: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "train", "opt_step": opt_step, "micro_step": 2 * opt_step, "loss": 3.25,
        "lr": 3e-4 * min(1, opt_step / 20), "tps": 140_000 + 900 * math.cos(opt_step), "mfu": 0.4,
        "grad_norm": 1 + 0.5 * math.sin(opt_step), "peak_mem_gib": 71.25,
        "tokens_seen": 65_536 * opt_step, "ppl": 1.0, "time": START + 3 * opt_step, **changes,
    }  # fmt: skip


def val_row(opt_step: int, loss: float) -> dict[str, Any]:
    place = {"opt_step": opt_step, "micro_step": 2 * opt_step}
    return {"kind": "val", **place, "val_loss": loss, "time": START + 3 * opt_step}


def event_row(kind: str, opt_step: int, message: str) -> dict[str, Any]:
    place = {"opt_step": opt_step, "micro_step": 2 * opt_step}
    return {"kind": "event", "event": kind, **place, "message": message}


def write_run(
    run: Path, rows: list[dict[str, Any]], *overrides: str, resumed: int | None = None
) -> Path:
    """A folder as a run leaves it, with these rows."""
    run.mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    again = "" if resumed is None else f"resumed from {run} at opt_step {resumed}, sample 1,600\n"
    (run / "train.log").write_text(f"torch.compile: each block\n{again}step= 1\n", "utf-8")
    given = ["training.total_steps=200", "training.warmup_steps=20", *overrides]
    write_run_record(run, *load_training_config(None, given))
    return run


def full_run(run: Path, *overrides: str, rows: int = 200, higher: float = 0.0) -> Path:
    """With everything that a run can have; all its curves by a share ``higher``."""
    steps = range(1, rows + 1)
    logged = [train_row(n, loss=3 + 7 * math.exp(-5 * n / rows) + 0.02 * (n % 2)) for n in steps]
    for row in logged:
        row |= {q.key: (1 + higher) * row[q.key] for q in QUANTITIES}
    logged += [val_row(n, (1 + higher) * 3.5) for n in range(rows // 4, rows + 1, rows // 4)]
    logged += [
        event_row("nan-guard", 60, "[nan-guard] loss nan at micro_step 121: window dropped"),
        event_row("nan-guard", 60, "[nan-guard] loss nan at micro_step 123: window dropped"),
        event_row("rollback", 50, "[nan-guard] back to opt_step 50"),
        event_row("spike", 90, "[spike] loss 9.1 is 6.0 above the recent median 3.1"),
    ]
    return write_run(run, logged, *overrides, resumed=120)


def page_of(*paths: Path, out: Path) -> str:
    return write_report(read_runs(paths), out).read_text(encoding="utf-8")


def words(page: str) -> str:
    """What a reader sees of it, without pictures."""
    body = re.sub(r"<svg.*?</svg>", "", page[page.index("<body>") :], flags=re.DOTALL)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))
    return text.replace("&quot;", '"').replace("&#x27;", "'").replace("&amp;", "&")


# What the page says ------------------------------------------------------------------------------


def test_page_of_one_run_holds_everything(tmp_path: Path) -> None:
    run = full_run(tmp_path / "one", "training.lr=6e-4", "model.grad_checkpoint=true")
    (run / "samples.jsonl").write_text(
        json.dumps({"opt_step": 200, "prompt": "def", "text": "def <b>\x1b[0m\n\tpass"}) + "\n"
    )
    page = page_of(run, out=tmp_path / "out")
    said = words(page)
    for expected in (
        "Training report: one", f"folder {run}", "state finished: 200 optimizer steps",
        f"validation loss, best {3.5:.4f}", "tokens trained on 13,107,200", "peak memory 71.25 GiB",
        "model FLOPs utilisation, median 40.0%", "first to last row 0:09:57",
        "1 x rollback, 2 x dropped window, 1 x spike, 1 x resumed",
        "120 resumed resumed from", "90 spike [spike] loss 9.1",
        "From the command line: training.total_steps: 200", "training.lr: 0.0006",
        "Defaults:", 'data.order: "sequential"', "model.d_model: 1024", "cpu model", "python 3.",
        'optimizer step 200, after "def":', "def &lt;b&gt;\ufffd[0m pass",
    ):  # fmt: skip
        assert expected in said, expected
    assert said.index("training.lr: 0.0006") < said.index("Defaults:") < said.index("data.order")
    assert page.count("<svg") == len(QUANTITIES)
    assert "Not recorded" not in said and "differ" not in said and "Rows:" not in said
    pictures = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert pictures == sorted(["index.html", *(f"{q.key}.png" for q in QUANTITIES)])
    loss = report_figures.LOSS.key
    assert (tmp_path / "out" / f"{loss}.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_and_where_they_differ(tmp_path: Path) -> None:
    runs = [
        full_run(tmp_path / "a" / "run", "training.lr=3e-4", "model.chunk_size=64"),
        full_run(tmp_path / "b" / "run", "training.lr=6e-4", "model.chunk_size=64"),
    ]
    said = words(page_of(*runs, out=tmp_path / "out"))
    assert "Training report: a/run, b/run" in said
    between = said[said.index("configurations differ") : said.index("Configuration of a/run")]
    assert between.split()[2:] == ["a/run", "b/run", "training.lr", "0.0003", "0.0006"]
    assert "Configuration of b/run" in said
    same = [full_run(tmp_path / name) for name in ("c", "d")]
    assert "configurations differ Nowhere." in words(page_of(*same, out=tmp_path / "same"))


@pytest.mark.parametrize("rows", [0, 1])
def test_a_run_that_has_hardly_begun(tmp_path: Path, rows: int) -> None:
    """No validation, no MFU, as on a CPU; even no row at all."""
    found = [train_row(n + 1) for n in range(rows)]
    for row in found:
        del row["mfu"]
    run = write_run(tmp_path / "run", found)
    page = page_of(run, out=tmp_path / "out")
    assert page.count("<svg") == (len(QUANTITIES) - 1) * rows
    said = words(page)
    assert f"state optimizer step {rows} of 200, going on or stopped" in said
    missing = "model FLOPs utilisation." if rows else "loss (nat per token), learning rate"
    assert f"Not recorded: {missing}" in said
    assert "validation" not in said[: said.index("Configuration")]


def test_a_real_run_stopped_and_gone_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    val = write_tokens(tmp_path / "val.bin", 24 * 8 + 1, seed=1)
    settings = config(tmp_path, val_data_path=val, eval_interval=4)
    assert stop_after(settings, 11) == 143
    run = tmp_path / "run"
    before = words(page_of(run, out=tmp_path / "before"))
    assert "state optimizer step 5 of 12, going on or stopped" in before
    assert Pretrainer(settings).train() == 0
    kept = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    main_says(["report", str(run)], capsys, f"report: {run / 'report' / 'index.html'}")
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == kept
    said = words((run / "report" / "index.html").read_text(encoding="utf-8"))
    assert "state finished: 12 optimizer steps" in said and "events 1 x resumed" in said
    assert "newest checkpoint optimizer step 12" in said
    assert "5 resumed resumed from" in said and "model.d_model: 16" in said
    found = read_run(run)
    assert found.notes == [] and found.series("val_loss")[0].tolist() == [4, 8, 12]


def main_says(argv: list[str], capsys: pytest.CaptureFixture[str], last: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert not stop.value.code and captured.err == ""
    assert captured.out.splitlines()[-1] == last
    return captured.out


def test_damage_is_named_and_not_fatal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = full_run(tmp_path / "run", rows=40)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2], lines[9] = lines[2][:30], "[1, 2]"
    lines.insert(20, json.dumps({"kind": "train", "loss": 1.0}))
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "train", "opt_st')
    (run / "config.yaml").write_text("config: [")
    (run / "env.json").unlink()
    said = main_says(
        ["report", str(run), "--out", str(tmp_path / "out")],
        capsys,
        f"report: {tmp_path / 'out' / 'index.html'}",
    )
    notes = (
        "metrics.jsonl: 2 lines left out as damaged: 3, 10",
        "metrics.jsonl: 1 rows without an opt_step left out",
        "config.yaml: absent or damaged",
        "env.json: absent or damaged",
    )
    shown = words((tmp_path / "out" / "index.html").read_text())
    for note in notes:
        assert f"[warn] {run}: {note}" in said and f"{note}." in shown
    assert len(read_run(run).series("loss")[0]) == 38
    assert "state optimizer step 40" in shown and "Not kept in this run folder." in shown


def test_names_that_mean_something_elsewhere(tmp_path: Path) -> None:
    """HTML, matplotlib's mathematics, and its sign for 'no label'."""
    names = ("_a$x_1$<i>&amp;", "b")
    page = page_of(*(full_run(tmp_path / n, rows=20) for n in names), out=tmp_path / "out")
    assert "<i>" not in page
    assert "_a$x_1$&lt;i&gt;&amp;amp;" in page
    assert "a$x_1$&lt;i&gt;&amp;amp;</text>" in page, "the legend"


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    run, out = full_run(tmp_path / "run", rows=10), tmp_path / "out"
    write_report([read_run(run)], out)
    (out / "notes.txt").write_text("the user's")
    lines = (run / "metrics.jsonl").read_text().replace('"mfu"', '"other"')
    (run / "metrics.jsonl").write_text(lines)
    write_report([read_run(run)], out)
    assert not (out / "mfu.png").exists()
    assert (out / "loss.png").exists() and (out / "notes.txt").exists()


def test_samples_of_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = {"vocab_size": 50257, "model": {"vocab_size": 50257}}
    settings = config(tmp_path, max_steps=4, warmup_steps=0, save_every=2, **big)
    assert Pretrainer(settings).train() == 0
    capsys.readouterr()
    run = tmp_path / "run"
    page = run / "report" / "index.html"
    for _ in range(2):
        main_says(["report", str(run), "--sample", "def f", "--sample", "a < b"], capsys,
                  f"report: {page}")  # fmt: skip
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(s["opt_step"], s["prompt"]) for s in samples] == 2 * [(4, "def f"), (4, "a < b")]
    for sample in samples:
        assert sample["text"].startswith(sample["prompt"])
        assert len(sample["text"]) > len(sample["prompt"])
    text = page.read_text(encoding="utf-8")
    assert text.count("optimizer step 4, after &quot;def f&quot;:") == 2
    assert "<pre" in text and "def f" in text


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = full_run(tmp_path / "run", rows=5)
    for paths, complaint in (
        ([tmp_path / "nowhere"], "is not a folder; name a run folder"),
        ([tmp_path], "holds no metrics.jsonl"),
        ([run, tmp_path / "run" / ".." / "run"], "is named twice"),
    ):
        with pytest.raises(UserError, match=complaint):
            read_runs(paths)
    found = read_run(run)
    with pytest.raises(UserError, match="metrics.jsonl: cannot write there .*choose another --out"):
        write_report([found], run / "metrics.jsonl")
    with pytest.raises(UserError, match="--sample is empty"):
        add_samples(found, ["a", ""])
    with pytest.raises(UserError, match="holds no checkpoint"):
        add_samples(found, ["a"])
    there = importlib.util.find_spec
    monkeypatch.setattr(
        report.importlib.util, "find_spec", lambda n: None if n == "matplotlib" else there(n)
    )
    with pytest.raises(UserError, match=r'report needs matplotlib; run pip install ".*\[plots\]"'):
        report.report_command([str(run)])
    assert not (run / "report").exists()


# What the figures draw ---------------------------------------------------------------------------


def test_a_thinned_curve_keeps_its_extremes_in_order() -> None:
    generator = np.random.default_rng(0)
    x, y = np.arange(20_001.0), generator.normal(size=20_001)
    y[4_321], y[12_345] = 50, -50
    y[1_000:1_200] = math.nan  # longer than two stretches, so that the gap must show
    curve = Curve.of((x, y))
    assert len(curve.x) <= MAX_POINTS and bool((np.diff(curve.x) > 0).all())
    assert {50.0, -50.0} <= set(curve.y.tolist())
    assert bool(np.isnan(curve.y[(curve.x >= 1_000) & (curve.x < 1_200)]).any())
    assert bool((y[curve.x.astype(int)][~np.isnan(curve.y)] == curve.y[~np.isnan(curve.y)]).all())
    for low, high in zip(range(0, 20_000, 500), range(500, 20_500, 500), strict=True):
        inside = curve.y[(curve.x >= low - 70) & (curve.x < high + 70)]
        assert np.nanmin(inside) <= np.nanmin(y[low:high])
        assert np.nanmax(inside) >= np.nanmax(y[low:high])
    short = Curve.of((x[:MAX_POINTS], y[:MAX_POINTS]))
    assert len(short.x) == MAX_POINTS


def test_thousands_of_rows_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    runs = [full_run(tmp_path / "long", rows=8_000), full_run(tmp_path / "short", rows=40)]
    page = page_of(*runs, out=tmp_path / "out")
    assert "Rows: 8,000 of long. Of more than 600 only" in words(page)
    assert len(page) < 400_000


def steep(*, spike: float = 0.0, rise: float = 0.0) -> list[dict[str, Any]]:
    """A loss that falls from 11 to 3 within few rows, with a spike or a rise that stays."""
    found = [train_row(n, loss=3 + 8 * math.exp(-n / 3)) for n in range(300)]
    for row in found[200:202]:
        row["loss"] += spike
    for row in found[250:]:
        row["loss"] += rise
    return found


@pytest.mark.parametrize(
    ("how", "clipped"), [({}, False), ({"spike": 400.0}, True), ({"rise": 400.0}, False)]
)
def test_only_a_spike_leaves_the_picture(
    tmp_path: Path, how: dict[str, float], clipped: bool
) -> None:
    from matplotlib.figure import Figure

    loss, *_ = figures([read_run(write_run(tmp_path / "run", steep(**how)))])
    assert ("2 points lie above the picture, the highest at 403." in loss.caption) is clipped
    drawn = Figure()
    loss.draw(drawn)
    bottom, top = drawn.axes[0].get_ylim()
    assert top > 11
    assert bool(top < 13 and bottom > 1) is ("rise" not in how)


def test_marks_stand_where_things_happened(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    run = read_run(full_run(tmp_path / "run"))
    loss, lr, *_ = figures([run])
    drawn = Figure()
    loss.draw(drawn)
    axes = drawn.axes[0]
    marks = {line.get_marker(): line.get_xdata() for line in axes.lines if line.get_ls() == "None"}
    assert {marker: list(x) for marker, x in marks.items()} == {
        "x": [60], "<": [50], "^": [90], ">": [120]
    }  # fmt: skip
    downwards = [line.get_xdata()[0] for line in axes.lines if line.get_alpha() == 0.5]
    assert sorted(downwards) == [50, 120]
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels == [
        "training", "validation", "rollback", "dropped window", "spike", "resumed",
    ]  # fmt: skip
    other = Figure()
    lr.draw(other)
    assert other.legends == [] and len(other.axes[0].lines) == len(axes.lines) - 1


def test_an_event_without_a_place_belongs_to_the_row_before(tmp_path: Path) -> None:
    rows = [train_row(1), train_row(2), {"kind": "event", "event": "new", "message": "m"}]
    run = read_run(write_run(tmp_path / "run", rows))
    assert [(event.kind, event.opt_step) for event in run.events] == [("new", 2)]
    assert "1 x new" in words(page_of(run.path, out=tmp_path / "out"))


# How it looks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "no Chromium to open the page with (Debian: apt install chromium)"
        warnings.warn(reason, stacklevel=1)  # a skip alone is easily overlooked
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


# The plot areas of all figures, and how many CSS pixels a point of their text takes.
PLOTS = """[...document.querySelectorAll("figure svg")].map(svg => {
  const area = svg.querySelector("#axes_1 #patch_2 path").getBoundingClientRect();
  const all = svg.getBoundingClientRect();
  return [area.left, area.top + scrollY, area.right, area.bottom + scrollY,
          all.left, all.right, all.width / svg.viewBox.baseVal.width]; })"""


def painted(pixels: np.ndarray, ground: np.ndarray, colour: str) -> np.ndarray:
    """Where (height, width) a colour covers at least half of a pixel over the ground."""
    ink = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) - ground.astype(float)
    there = pixels.astype(float) - ground
    cover = there @ ink / (ink @ ink)
    rest = np.linalg.norm(there - cover[..., None] * ink, axis=-1)
    return (cover > 0.5) & (cover < 1.2) & (rest < 30)


def check_look(
    browser: Browser, page: Path, colours: list[str], size: tuple[int, int], *, dark: bool
) -> None:
    """Every figure shows every colour over its width, nothing overflows, nothing is fetched."""
    browser.open(page, size, dark=dark)
    assert browser.requests() == [page.resolve().as_uri()] and browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") == size[0]
    pixels = browser.screenshot()
    ground = pixels[2, 2]
    assert int(ground.max()) < 60 if dark else int(ground.min()) > 240
    contrast = np.abs(pixels[:400].astype(int) - ground).max()
    assert contrast > 150, "the text stands out"
    plots = browser.evaluate(PLOTS)
    assert plots
    for name, (left, top, right, bottom, *outer, scale) in enumerate(plots):
        assert 0 <= outer[0] < outer[1] <= size[0]
        assert 8 * scale > 8, "the smallest text of a figure is read without zooming"
        area = pixels[round(top) : round(bottom), round(left) : round(right)]
        assert area.shape[0] > 100 and area.shape[1] > 180
        for colour in colours:
            covered = painted(area, ground, colour).any(axis=0).mean()
            assert covered > 0.6, (name, colour, covered)  # curves may cross
        assert not painted(area, ground, COLOURS[2]).any(), "a colour that no run has"
    left, top, right, bottom, *_ = map(round, plots[0])
    loss = painted(pixels[top:bottom, left:right], ground, colours[0])
    rows = [np.flatnonzero(part.any(axis=1)).mean() for part in np.array_split(loss, 10, axis=1)]
    assert rows[0] < 0.6 * len(loss) < 0.7 * len(loss) < rows[-1], "it falls"


def test_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    """The sample: one page, once on a phone in the dark and once on a desk."""
    runs = [full_run(tmp_path / "a"), full_run(tmp_path / "b", higher=0.2)]
    page = write_report(read_runs(runs), tmp_path / "out")
    for size, dark in ((PHONE, True), (DESKTOP, False)):
        check_look(browser, page, list(COLOURS[:2]), size, dark=dark)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("size", "dark"), list(product((DESKTOP, (768, 1024), PHONE, (320, 600)), (False, True)))
)
def test_every_kind_of_page_in_a_browser(
    browser: Browser, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    def open_page(name: str, *paths: Path) -> Path:
        return write_report(read_runs(paths), tmp_path / f"report_{name}")

    long_name = "a_run_whose_name_is_far_longer_than_any_line_of_a_phone_could_ever_be"
    kinds = {
        "one": [full_run(tmp_path / "one")],
        "long": [full_run(tmp_path / "long", rows=30_000)],
        "names": [
            full_run(tmp_path / long_name),
            full_run(tmp_path / f"{long_name}_2", higher=0.2),
        ],
        "many": [full_run(tmp_path / f"many{i}", higher=i / 10) for i in range(8)],
    }
    (kinds["one"][0] / "samples.jsonl").write_text(
        json.dumps({"opt_step": 9, "prompt": "x", "text": 300 * "long" + "\n" + 90 * "word "})
        + "\n"
    )
    for name, paths in kinds.items():
        page = open_page(name, *paths)
        if name == "many":  # more than there are colours
            browser.open(page, size, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") == size[0]
        else:
            check_look(browser, page, list(COLOURS[: len(paths)]), size, dark=dark)
    single = write_run(tmp_path / "single", [train_row(1)])
    browser.open(open_page("single", single), size, dark=dark)
    pixels = browser.screenshot()
    for left, top, right, bottom, *_ in browser.evaluate(PLOTS):
        area = pixels[round(top) : round(bottom), round(left) : round(right)]
        assert painted(area, pixels[2, 2], COLOURS[0]).any(), "a single row is a dot"
    nothing = open_page("nothing", write_run(tmp_path / "nothing", []))
    browser.open(nothing, size, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") == size[0]
