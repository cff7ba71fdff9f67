"""Kernel tests whose checks run under Triton's interpreter, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path


def start_again(file: str, *options: str) -> int:
    """Runs the interpreted tests of ``file``; all must pass. Returns how many did."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, file],
        env=inherited | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None, child.stdout
    return int(passed[1])
