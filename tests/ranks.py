"""Runs of several ranks, as processes of this machine: what torchrun does, without its agent."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SEC = 120


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(n: int, arguments: Sequence[str], *, local_size: int | None = None) -> list:
    """``python ARGUMENTS`` as each of ``n`` ranks."""
    port = free_port()
    shared = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(local_size or n),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % (local_size or n))},
        )
        for rank in range(n)
    ]  # fmt: skip


def finish(processes: Sequence[subprocess.Popen]) -> list[subprocess.CompletedProcess]:
    """Waits for all; ends those that are left when one takes too long."""
    try:
        said = [p.communicate(timeout=TIMEOUT_SEC) for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(p.args, p.returncode, *both)
        for p, both in zip(processes, said, strict=True)
    ]
