"""A run folder as a report reads it: whatever is there, and a note on whatever is not."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mamba3_lite.errors import UserError, reading
from mamba3_lite.training.config import yaml_key
from mamba3_lite.training.run_record import CONFIG, ENVIRONMENT
from mamba3_lite.utils.checkpoint import CheckpointManager

METRICS, LOG, SAMPLES = "metrics.jsonl", "train.log", "samples.jsonl"
DEFAULT = "default"
_HUGE = 1e300  # beyond it a number cannot be drawn
_RESUMED = re.compile(r"resumed from .* at opt_step (\d+), sample .*$", re.MULTILINE)

Row = dict[str, Any]
Series = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Event:
    """Something that happened: a kind of the log's events, or ``resume``."""

    kind: str
    opt_step: int
    message: str


@dataclass(frozen=True)
class Run:
    """One run, finished or going on.

    ``config`` maps every ``section.key`` to its value and is empty where the folder keeps none;
    ``sources`` names the origin of those that are not defaults.
    """

    path: Path
    name: str
    rows: list[Row]  # of metrics.jsonl, events left out, in its order
    events: list[Event]
    config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    samples: list[Row] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be read, and where

    def series(self, key: str) -> Series:
        """(opt_step, value), each (n,) float64, of all rows with this key.

        A value that is no finite number is NaN.
        """
        found = [(row["opt_step"], _number(row[key])) for row in self.rows if key in row]
        table = np.array(found, dtype=np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def source(self, key: str) -> str:
        """Where the value of ``section.key`` came from."""
        if key == "model.grad_checkpoint" and key not in self.sources:
            return self.source("training.grad_checkpoint")  # which counts where the model has none
        return self.sources.get(key, DEFAULT)


def read_run(path: str | Path, *, name: str | None = None) -> Run:
    """Everything that a report shows of a run folder; damage is a note, never an error.

    Raises:
        UserError: no folder, one where no run has logged, or one that may not be read.
    """
    path = Path(path)
    with reading(str(path), "mend its permissions"):
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; name a run folder (training.save_dir).")
        if not (path / METRICS).is_file():
            raise UserError(f"{path} holds no {METRICS}: no run has logged there.")
        return _read(path, name or path.resolve().name)


def _read(path: Path, name: str) -> Run:
    notes: list[str] = []
    logged = _read_lines(path / METRICS, notes, needed=("kind",))
    rows = [row for row in logged if row["kind"] != "event" and _is_count(row.get("opt_step"))]
    if unplaced := sum(row["kind"] != "event" for row in logged) - len(rows):
        notes.append(f"{METRICS}: {unplaced} rows without an opt_step left out")
    log = _read_text(path / LOG) or ""
    resumes = [Event("resume", int(found[1]), found[0]) for found in _RESUMED.finditer(log)]
    config, sources = _read_config(path / CONFIG, notes)
    return Run(
        path=path,
        name=name,
        rows=rows,
        events=sorted([*_events(logged), *resumes], key=lambda event: event.opt_step),
        config=config,
        sources=sources,
        environment=_read_json(path / ENVIRONMENT, notes),
        samples=_read_lines(path / SAMPLES, notes, needed=("opt_step", "prompt", "text")),
        checkpoints=CheckpointManager(path).steps(),
        notes=notes,
    )


def read_runs(paths: Iterable[str | Path]) -> list[Run]:
    """All of them, each with the shortest name that tells it from the others."""
    given = [Path(path) for path in paths]
    whole = [path.resolve() for path in given]
    for index, path in enumerate(whole):
        if path in whole[:index]:
            raise UserError(f"{given[index]} is named twice; name each run once.")
    names = ["/".join(path.parts[-1:]) for path in whole]
    for depth in range(2, max(len(path.parts) for path in whole) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(path.parts[-depth:]) for path in whole]
    return [read_run(path, name=name) for path, name in zip(given, names, strict=True)]


def _number(value: Any) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if fits and abs(value) < _HUGE else math.nan


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _HUGE


def _events(logged: list[Row]) -> list[Event]:
    """The log's own, each at its opt_step, or at that of the last row before it."""
    found, last = [], 0
    for row in logged:
        at = row["opt_step"] if _is_count(row.get("opt_step")) else last
        if row["kind"] == "event":
            found.append(Event(str(row.get("event")), at, str(row.get("message", ""))))
        else:
            last = at
    return found


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _read_lines(path: Path, notes: list[str], *, needed: tuple[str, ...]) -> list[Row]:
    """Rows with all the keys ``needed``; of a running file the last line may be unfinished."""
    text = _read_text(path) or ""
    lines, rows, damaged = text.split("\n"), [], []
    unfinished = lines.pop()
    for number, line in enumerate([*lines, unfinished], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and all(key in row for key in needed):
            rows.append(row)
        elif number <= len(lines):
            damaged.append(number)
    if damaged:
        shown = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        lines_are = "line" if len(damaged) == 1 else f"{len(damaged)} lines"
        notes.append(f"{path.name}: {lines_are} left out as damaged: {shown}")
    return rows


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(_read_text(path) or "null")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name}: absent or damaged")
        return {}
    return found


def _read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and sources by ``section.key``."""
    try:
        record = yaml.safe_load(_read_text(path) or "")
        config, sources = record["config"], dict(record["sources"])
        values = {yaml_key(k): v for k, v in config.items() if k not in ("model_config", "data")}
        values |= {f"model.{name}": value for name, value in config["model_config"].items()}
        values |= {f"data.{name}": value for name, value in config["data"].items()}
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError):
        notes.append(f"{path.name}: absent or damaged")
        return {}, {}
    return values, sources
