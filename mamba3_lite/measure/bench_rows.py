"""Rows of measurements: JSON lines with what their numbers depend on, and which of them compare."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mamba3_lite import hardware
from mamba3_lite.errors import UserError, reading

KIND = "bench"  # what the field "benchmark" holds in rows of the command
_NEEDED = ("case", "settings", "repeats_ms", "environment", "time")
# Of the environment, what a time depends on beside the code that is measured.
MACHINE = ("gpus", "driver", "cpu", "threads", "python", "torch", "triton", "cuda")

Row = Mapping[str, Any]


def environment(command: str, commit: str | None = None) -> dict[str, Any]:
    """Machine, driver, versions, commit and command, ready for JSON.

    Args:
        commit: given where there is no checkout.
    """
    facts = hardware.environment_record()
    facts["driver"] = None
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    if commit:
        facts["git"] = {"commit": commit, "dirty": False}
    return {**facts, "command": command}


def now() -> str:
    """In UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def append(path: Path, rows: Sequence[Row]) -> None:
    """Adds rows to a file, which is made where it is absent.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as problem:
        raise UserError(
            f"{path}: cannot be written ({problem.strerror}); name another file."
        ) from problem


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of the command in a file; those of other benchmarks are passed over.

    Raises:
        UserError: the file cannot be read, or a line is no row.
    """
    with reading(str(path), "name a file that --out has written"):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            lines = ["no text"]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        ours = isinstance(row, dict) and row.get("benchmark") == KIND
        if not isinstance(row, dict) or (ours and not all(name in row for name in _NEEDED)):
            raise UserError(
                f"{path}, line {number} is no row of measurements; name a file that --out has "
                "written, or remove that line."
            )
        if ours:
            rows.append(row)
    return rows


def identity(row: Row) -> dict[str, Any]:
    """What must be equal for two times of one case to differ by the code alone."""
    same = {f"settings.{name}": value for name, value in row["settings"].items()}
    return same | {name: row["environment"].get(name) for name in MACHINE}


def differences(old: Row, new: Row) -> list[str]:
    """The fields in which two rows do not compare, each with both values."""
    before, after = identity(old), identity(new)
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def counterparts(rows: Sequence[Row], new: Sequence[Row], *, across: bool) -> dict[str, Row]:
    """For each case of ``new`` that has one, the newest row of ``rows`` to compare it with.

    Rows lie in the order of time. One that compares is taken; with ``across`` it is the newest of
    the case, whatever it is of.

    Raises:
        UserError: a case has rows, but none that compares.
    """
    found, problems = {}, []
    for row in new:
        same_case = [old for old in rows if old["case"] == row["case"]]
        comparable = [old for old in same_case if across or not differences(old, row)]
        if comparable:
            found[row["case"]] = comparable[-1]
        elif same_case:
            problems.append((row["case"], differences(same_case[-1], row)))
    if problems:
        case, fields = problems[0]
        more = f" (and {len(problems) - 1} more cases)" if problems[1:] else ""
        raise UserError(
            f"the baseline does not compare for {case!r}{more}: {'; '.join(fields)}. Name another "
            "file, measure as it was measured, or say --across."
        )
    return found
