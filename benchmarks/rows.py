"""The results files: one JSON line a measurement, each with what its numbers depend on."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mamba3_lite import hardware


def environment(commit: str | None = None) -> dict[str, Any]:
    """Machine, driver, versions, the command, and the commit, given where there is no checkout."""
    facts = hardware.environment_record()
    facts["driver"] = None
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    if commit:
        facts["git"] = {"commit": commit, "dirty": False}
    facts["command"] = shlex.join(["python", *sys.argv])
    return facts


def append(path: Path, row: dict[str, Any], facts: dict[str, Any], *, hide: tuple[str, ...] = ()):
    """Adds a row to a file, and prints it as one JSON line without what is too long to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "environment": facts, "time": now}) + "\n")
    print(json.dumps({key: value for key, value in row.items() if key not in hide}), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
