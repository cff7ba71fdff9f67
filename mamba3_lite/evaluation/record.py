"""What an evaluation leaves: one JSON file each in the run's folder ``eval``, none overwritten."""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mamba3_lite.errors import UserError

FOLDER, LATEST = "eval", "latest.json"
KINDS = ("perplexity", "tasks", "choices")

Record = dict[str, Any]


def require_writable(folder: Path) -> None:
    """``UserError`` if records could not be written to ``folder``, which need not exist yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder}: cannot write there; choose another folder (--out).")


def write_record(folder: Path, record: Record) -> Path:
    """Writes a record under a new name, by its kind and time, and lists it in ``latest.json``.

    ``latest.json`` names the newest record of each kind.

    Raises:
        UserError: the folder cannot be written.
    """
    moment = datetime.fromisoformat(record["time"]).strftime("%Y%m%dT%H%M%SZ")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _claimed(folder, f"{record['kind']}-{moment}")
        _replace(path, record)
        newest = {kind: names[-1] for kind in KINDS if (names := _names(folder, kind))}
        _replace(folder / LATEST, newest)
    except OSError as problem:
        raise UserError(
            f"{folder}: cannot write there ({problem.strerror}); choose another folder (--out)."
        ) from problem
    return path


def _claimed(folder: Path, name: str) -> Path:
    """A file that was not there before, and that nobody else is given."""
    for number in range(1, 10_000):
        path = folder / f"{name}{f'-{number:04d}' if number > 1 else ''}.json"
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        return path
    raise AssertionError(f"{folder} holds ten thousand records of one second")


def _names(folder: Path, kind: str) -> list[str]:
    """Of all records of a kind, the oldest first."""
    return sorted((path.name for path in folder.glob(f"{kind}-*.json")), key=_order)


def _order(name: str) -> tuple[str, ...]:
    """By time, and within a second by number: a suffix comes behind none."""
    return tuple(name.removesuffix(".json").split("-")[1:])


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_records(run_dir: Path) -> tuple[list[Record], list[str]]:
    """The records of a run folder, the oldest first, and the names of files that are none."""
    folder = run_dir / FOLDER
    records: list[Record] = []
    damaged: list[str] = []
    names = [name for kind in KINDS for name in _names(folder, kind)]
    for name in sorted(names, key=_order):
        try:
            record = json.loads((folder / name).read_text(encoding="utf-8"))
            headlines(record), record["time"], record["checkpoint"]["opt_step"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            damaged.append(name)
        else:
            records.append(record)
    return records, damaged


def headlines(record: Record) -> list[str]:
    """What a record found, a line for each result."""
    results = record["results"]
    if record["kind"] == "perplexity":
        return [
            f"{row['data']}, {row['mode']}: {row['loss']:.4f} nat per token (perplexity "
            f"{row['perplexity']:,.2f}), {row['bits_per_byte']:.4f} bits per byte, "
            f"{row['tokens']:,} tokens, {row['bytes']:,} bytes"
            for row in results
        ]
    if record["kind"] == "choices":
        return [
            f"{row['data']}: accuracy {_share(row['accuracy'])}, normalised "
            f"{_share(row['accuracy_normalised'])}, chance {row['chance']:.1%}, "
            f"{row['questions']:,} questions"
            for row in results
        ]
    return [
        f"{name}: {', '.join(_metric(*found) for found in task['metrics'].items())}"
        for name, task in results["tasks"].items()
    ]


def _share(found: Mapping[str, float]) -> str:
    return f"{found['value']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _metric(name: str, found: Mapping[str, float | None]) -> str:
    value, error = found.get("value"), found.get("standard_error")
    shown = "none" if value is None else f"{value:.4f}"
    return f"{name} {shown}" + ("" if error is None else f" \N{PLUS-MINUS SIGN} {error:.4f}")
