"""The results files: one JSON line a measurement, each with what its numbers depend on."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from mamba3_lite.measure import bench_rows


def environment(commit: str | None = None) -> dict[str, Any]:
    """Machine, driver, versions, the command, and the commit, given where there is no checkout."""
    return bench_rows.environment(shlex.join(["python", *sys.argv]), commit)


def append(path: Path, row: dict[str, Any], facts: dict[str, Any], *, hide: tuple[str, ...] = ()):
    """Adds a row to a file, and prints it as one JSON line without what is too long to read."""
    bench_rows.append(path, [{**row, "environment": facts, "time": bench_rows.now()}])
    print(json.dumps({key: value for key, value in row.items() if key not in hide}), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
