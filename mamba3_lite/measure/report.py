"""The command ``report``: runs as figures and one self-contained page."""

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mamba3_lite.errors import UserError
from mamba3_lite.evaluation.record import headlines, read_records
from mamba3_lite.measure import html
from mamba3_lite.measure.report_figures import (
    MARKS,
    MAX_POINTS,
    QUANTITIES,
    Figure,
    figures,
    thinned,
)
from mamba3_lite.measure.run_folder import DEFAULT, SAMPLES, Run, read_runs

PAGE, FOLDER = "index.html", "report"
SAMPLE_TOKENS = 100
_MAX_EVENTS = 100
_MAX_SAMPLES = 6
_MAX_BROKEN = 4  # columns of a table whose words may be broken
_LONG_WORD = re.compile(r"<td>(?=[^<]*[^<\s]{15})")
_ABSENT = "-"

Section = tuple[str, str]


def write_report(runs: Sequence[Run], out: str | Path) -> Path:
    """Writes ``index.html``, which needs nothing beside it, and each of its figures as a PNG.

    Returns:
        The page.

    Raises:
        UserError: no matplotlib, or a folder that cannot be written.
    """
    out = Path(out)
    _need_matplotlib()
    drawn = figures(runs)
    sections = [
        ("Overview", _overview(runs)),
        ("Curves", _curves(runs, drawn)),
        *_evaluation_section(runs),
        *_event_section(runs),
        *_difference_section(runs),
        *(_configuration_section(run, several=len(runs) > 1) for run in runs),
        ("Environment", _environment(runs)),
        *_sample_section(runs),
    ]
    text = html.page(f"Training report: {', '.join(run.name for run in runs)}", sections)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for quantity in QUANTITIES:  # of an earlier report, none must stay beside the new page
            (out / f"{quantity.key}.png").unlink(missing_ok=True)
        for figure in drawn:
            path, size = out / f"{figure.name}.png", figure.size_inches
            html.save_picture(figure.draw, path, size_inches=(1.5 * size[0], 1.3 * size[1]))
        temporary = out / f".{PAGE}.tmp"  # somebody may be reading the page
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out / PAGE)
    except OSError as problem:
        raise UserError(
            f"{out}: cannot write there ({problem.strerror}); choose another --out."
        ) from problem
    return out / PAGE


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('report needs matplotlib; run pip install "mamba3-lite[plots]"')


def _curves(runs: Sequence[Run], drawn: Sequence[Figure]) -> str:
    """The figures, side by side where there is room."""
    columns = "repeat(auto-fit, minmax(min(100%, 20rem), 1fr))"
    parts = [f'<div style="display: grid; grid-template-columns: {columns}; gap: 0 1.5rem">']
    parts += [html.picture(f.draw, f.caption, size_inches=f.size_inches) for f in drawn]
    parts.append("</div>\n")
    if rows := thinned(runs):
        parts.append(
            html.paragraph(
                f"Rows: {', '.join(rows)}. Of more than {MAX_POINTS} only the lowest and the "
                f"highest of each of {MAX_POINTS // 2} equal stretches are drawn.",
                soft=True,
            )
        )
    if missing := [q.label for q in QUANTITIES if q.key not in {figure.name for figure in drawn}]:
        parts.append(html.paragraph(f"Not recorded: {', '.join(missing)}.", soft=True))
    return "".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose long words break where a phone is too narrow; one of many columns scrolls."""
    table = html.table(header, rows)
    if len(header) > _MAX_BROKEN:
        return table
    return _LONG_WORD.sub('<td style="overflow-wrap: anywhere">', table)


def _overview(runs: Sequence[Run]) -> str:
    facts = [_facts(run) for run in runs]
    parts = [_table(["", *(run.name for run in runs)], _side_by_side(facts))]
    for run in runs:
        where = "" if len(runs) == 1 else f"{run.name}: "
        parts += [html.paragraph(f"{where}{note}.") for note in run.notes]
    parts.append(html.paragraph(f"Written {_when(datetime.now(UTC).timestamp())}.", soft=True))
    return "".join(parts)


def _side_by_side(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    """A row for each name in any of the columns, in their order."""
    names = {name: None for column in columns for name in column}
    return [[name, *(column.get(name, _ABSENT) for column in columns)] for name in names]


def _facts(run: Run) -> dict[str, str]:
    facts = {"folder": str(run.path), "state": _state(run)}
    times = [row["time"] for row in run.rows if isinstance(row.get("time"), int | float)]
    if times:
        facts["last row"] = _when(times[-1])
        span = timedelta(seconds=round(max(0, times[-1] - times[0])))
        facts["first to last row"] = f"{span}, pauses included"
    if run.checkpoints:
        facts["newest checkpoint"] = f"optimizer step {run.checkpoints[-1]:,}"
    for key, name in (("loss", "training loss, last"), ("val_loss", "validation loss, last")):
        if len(values := _finite(run, key)):
            facts[name] = f"{values[-1]:.4f}"
    if len(values := _finite(run, "val_loss")):
        facts["validation loss, best"] = f"{values.min():.4f}"
    if len(values := _finite(run, "tokens_seen")):
        facts["tokens trained on"] = f"{values[-1]:,.0f}"
    for key, name, form in (
        ("tps", "tokens per second, median", "{:,.0f}"),
        ("mfu", "model FLOPs utilisation, median", "{:.1%}"),
    ):
        if len(values := _finite(run, key)):
            facts[name] = form.format(np.median(values))
    if len(values := _finite(run, "peak_mem_gib")):
        facts["peak memory"] = f"{values.max():.2f} GiB"
    facts["events"] = _event_counts(run) or "none"
    return facts


def _state(run: Run) -> str:
    reached = max([row["opt_step"] for row in run.rows] + run.checkpoints, default=0)
    total = run.config.get("training.total_steps")
    if not isinstance(total, int):
        return f"optimizer step {reached:,}"
    if reached >= total:
        return f"finished: {total:,} optimizer steps"
    return f"optimizer step {reached:,} of {total:,}, going on or stopped"


def _finite(run: Run, key: str) -> np.ndarray:
    values = run.series(key)[1]
    return values[np.isfinite(values)]


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _event_name(kind: str) -> str:
    return MARKS[kind][0] if kind in MARKS else kind


def _event_counts(run: Run) -> str:
    counts = Counter(event.kind for event in run.events)
    return ", ".join(f"{count:,} x {_event_name(kind)}" for kind, count in counts.items())


def _evaluation_section(runs: Sequence[Run]) -> list[Section]:
    """What the command eval has left in the run folders, the newest first."""
    several = len(runs) > 1
    rows, notes = [], ""
    for run in runs:
        records, damaged = read_records(run.path)
        for record in records[::-1]:
            opt_step, moment = record["checkpoint"]["opt_step"], record["time"]
            place = _ABSENT if opt_step is None else f"{opt_step:,}"
            when = _when(datetime.fromisoformat(moment).timestamp())
            start = [*([run.name] if several else []), place, when]
            rows += [[*start, line] for line in headlines(record)]
        if damaged:
            where = f"{run.name}: " if several else ""
            notes += html.paragraph(f"{where}damaged: {', '.join(damaged)}.")
    if not rows and not notes:
        return []
    header = [*(["run"] if several else []), "optimizer step", "when", "result"]
    return [("Evaluations", (_table(header, rows) if rows else "") + notes)]


def _event_section(runs: Sequence[Run]) -> list[Section]:
    """Newest first, and no more than anyone reads."""
    several = len(runs) > 1
    found = [(event, run) for run in runs for event in run.events]
    found.sort(key=lambda pair: -pair[0].opt_step)
    if not found:
        return []
    rows = [
        [*([run.name] if several else []), f"{e.opt_step:,}", _event_name(e.kind), e.message]
        for e, run in found[:_MAX_EVENTS]
    ]
    content = _table([*(["run"] if several else []), "optimizer step", "event", "log"], rows)
    if len(found) > _MAX_EVENTS:
        content += html.paragraph(f"The last {_MAX_EVENTS} of {len(found):,}.", soft=True)
    return [("Events", content)]


def _difference_section(runs: Sequence[Run]) -> list[Section]:
    """Keys whose values are not the same in all runs whose configuration is known."""
    known = [run for run in runs if run.config]
    if len(known) < 2:
        return []
    keys = {key: None for run in known for key in run.config}
    shown = [[_value(run.config, key) for run in known] for key in keys]
    rows = [[key, *row] for key, row in zip(keys, shown, strict=True) if len(set(row)) > 1]
    if rows:
        content = _table(["", *(run.name for run in known)], rows)
    else:
        content = html.paragraph("Nowhere.")
    return [("Where the configurations differ", content)]


def _value(config: dict[str, Any], key: str) -> str:
    return json.dumps(config[key]) if key in config else _ABSENT


def _configuration_section(run: Run, *, several: bool) -> Section:
    """Every value under the source that it came from, what was set by somebody first."""
    by_source: dict[str, list[str]] = {}
    for key in run.config:
        by_source.setdefault(run.source(key), []).append(key)
    parts = []
    for source in sorted(by_source, key=lambda source: source == DEFAULT):
        lines = [f"{key}: {_value(run.config, key)}" for key in by_source[source]]
        title = "Defaults" if source == DEFAULT else f"From {source}"
        parts.append(html.paragraph(f"{title}:") + _items(lines))
    heading = f"Configuration of {run.name}" if several else "Configuration"
    return heading, "".join(parts) or html.paragraph("Not kept in this run folder.")


def _items(lines: Iterable[str]) -> str:
    """A list whose lines wrap on a narrow screen."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>\n" for line in lines) + "</ul>\n"


def _environment(runs: Sequence[Run]) -> str:
    facts = [{k: _fact(v) for k, v in run.environment.items()} for run in runs]
    return _table(["", *(run.name for run in runs)], _side_by_side(facts))


def _fact(value: Any) -> str:
    """A value of env.json on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_fact(item)}" for name, item in value.items())
    if isinstance(value, list):
        counts = Counter(map(_fact, value))
        return "; ".join(f"{count} x {fact}" for fact, count in counts.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _sample_section(runs: Sequence[Run]) -> list[Section]:
    parts = []
    for run in runs:
        for sample in run.samples[::-1][:_MAX_SAMPLES]:
            title = f"optimizer step {sample['opt_step']}, after {json.dumps(sample['prompt'])}"
            where = "" if len(runs) == 1 else f"{run.name}, "
            parts.append(html.paragraph(f"{where}{title}:") + _text(str(sample["text"])))
    return [("Samples", "".join(parts))] if parts else []


def _text(text: str) -> str:
    """A sample as it is, but in lines that wrap; a model may have written anything."""
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return html.listing(shown).replace("<pre>", '<pre style="white-space: pre-wrap">', 1)


def add_samples(run: Run, prompts: Sequence[str]) -> None:
    """Continues each prompt with the newest checkpoint and keeps the texts in the run folder.

    Raises:
        UserError: an empty prompt, no checkpoint, or a folder that cannot be written.
    """
    import torch

    from mamba3_lite.data.tokenizer import load_tokenizer
    from mamba3_lite.inference.generate import generate, load_model

    if "" in prompts:
        raise UserError("--sample is empty: give at least one character.")
    newest = run.checkpoints[-1] if run.checkpoints else None
    model = load_model(run.path, newest, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(run.config.get("data.tokenizer", "gpt2"))
    texts = generate(
        model, [tokenizer.encode(prompt) for prompt in prompts], max_new_tokens=SAMPLE_TOKENS,
        temperature=0.8, top_k=50, eos_id=tokenizer.eos_id,
    )  # fmt: skip
    samples = [
        {"opt_step": newest, "prompt": prompt, "text": prompt + tokenizer.decode(ids)}
        for prompt, ids in zip(prompts, texts, strict=True)
    ]
    try:
        with (run.path / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(sample) + "\n" for sample in samples)
    except OSError as problem:
        raise UserError(
            f"{run.path / SAMPLES}: cannot be written ({problem.strerror}); leave --sample out."
        ) from problem
    run.samples.extend(samples)


def report_command(
    runs: Annotated[list[str], typer.Argument(help="Run folders, finished or going on.")],
    out: Annotated[
        str | None, typer.Option(help="Where to write; default: 'report' in the first run folder.")
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(help="Continue this prompt with the newest checkpoint; may be repeated."),
    ] = None,
) -> None:
    """Show runs as figures and one page that needs nothing else and reads well on a phone.

    Loss, learning rate, speed, gradient norm and memory with the guard's events, the configuration
    and where each value came from, the environment, samples. Several runs share the figures.

    Examples:

    mamba3-lite report runs/quickstart --sample "def main("

    mamba3-lite report runs/a runs/b --out comparison
    """
    _need_matplotlib()  # before a sample takes its time
    found = read_runs(runs)
    for run in found:
        if sample:
            add_samples(run, sample)
        for note in run.notes:
            print(f"[warn] {run.path}: {note}")
    page = write_report(found, found[0].path / FOLDER if out is None else out)
    print(f"report: {page}")
