"""`prepare` killed at any moment and run again gives the bytes of an uninterrupted run."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data_jobs import jsonl, texts, tree

ROOT = Path(__file__).resolve().parents[1]

# Small parts and batches, so that there is much to interrupt; `die` is the number of the durable
# operation (sync, rename, commit, delete) before which the process kills itself, 0 for none.
PROGRAM = """
import os, shutil, signal, sys
from pathlib import Path
from mamba3_lite.data import encode, ingest, pack, parts
from mamba3_lite.data.config import load_job
from mamba3_lite.data.prepare import prepare_job

die, done = int(sys.argv[2]), 0

def armed(owner, name):
    function = getattr(owner, name)
    def counted(*args, **kwargs):
        global done
        done += 1
        if done == die:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    setattr(owner, name, counted)

for owner, name in ((os, "fsync"), (os, "rename"), (Path, "rename"), (Path, "unlink"),
                    (shutil, "rmtree"), (parts.State, "commit"), (parts.State, "set_fact")):
    armed(owner, name)
ingest.PART_RECORDS, ingest._BATCH_TEXTS, pack._RUN_TOKENS = 50, 7, 500
encode._SERIAL_CHARS = 0
print("ready", flush=True)
prepare_job(load_job(sys.argv[1]), log=lambda message: None, progress=False)
print("operations", done, flush=True)
"""


def write_config(folder: Path, out: str, *, workers: int) -> Path:
    """Two sources that share documents; both are read in several parts, both splits packed."""
    first, second = texts("a", 170), texts("b", 120)
    for name, some in (("a", [*first, *first[:10]]), ("b", [*first[3:9], *second])):
        if not (folder / f"{name}.jsonl").exists():
            jsonl(folder / f"{name}.jsonl", some)
    path = folder / f"{out}.yaml"
    path.write_text(
        f"prepare: {{out: {folder / out}, val_fraction: 0.2, shard_size_tokens: 700, "
        f"workers: {workers}}}\n"
        "sources:\n"
        f"  - {{name: a, weight: 0.6, paths: {folder / 'a.jsonl'}}}\n"
        f"  - {{name: b, weight: 0.4, paths: {folder / 'b.jsonl'}}}\n"
    )
    return path


def start(config: Path, die: int = 0) -> subprocess.Popen[str]:
    """The program, past its imports."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(config), str(die)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def finish(config: Path) -> tuple[int, float]:
    """Run to the end; (durable operations, seconds)."""
    begun = time.monotonic()
    process = start(config)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return int(said.split()[1]), time.monotonic() - begun


def kill_at_random(folder: Path, kills: int, *, seed: int, workers: int) -> None:
    fresh = write_config(folder, "fresh", workers=workers)
    _, seconds = finish(fresh)
    config, out = write_config(folder, "killed", workers=workers), folder / "killed"
    rng = np.random.default_rng(seed)
    killed = 0
    while killed < kills:
        process = start(config)
        try:
            process.wait(timeout=float(rng.uniform(0, seconds)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        else:
            assert process.returncode == 0
            assert tree(out) == tree(folder / "fresh")
            shutil.rmtree(out)
    finish(config)
    assert tree(out) == tree(folder / "fresh")


def kill_before(folder: Path, operations: list[int]) -> None:
    """One kill each, on an empty folder, and the run that repairs it."""
    config, out = write_config(folder, "killed", workers=1), folder / "killed"
    for die in operations:
        process = start(config, die)
        assert process.wait(timeout=120) == -9
        assert not (out / "prepare.json").exists() or tree(out / "train")
        finish(config)
        assert tree(out) == tree(folder / "fresh"), f"killed before operation {die}"
        shutil.rmtree(out)


def test_three_kills_at_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 3, seed=0, workers=1)


def test_three_kills_at_telling_moments(tmp_path: Path) -> None:
    """Inside reading, inside packing, and before the last rename but one."""
    total, _ = finish(write_config(tmp_path, "fresh", workers=1))
    kill_before(tmp_path, [total // 3, 2 * total // 3, total - 3])


@pytest.mark.campaign
@pytest.mark.parametrize(("kills", "workers"), [(50, 1), (10, 2)])
def test_many_kills_at_random_moments(kills: int, workers: int, tmp_path: Path) -> None:
    kill_at_random(tmp_path, kills, seed=1, workers=workers)


@pytest.mark.campaign
def test_a_kill_before_every_durable_operation(tmp_path: Path) -> None:
    total, _ = finish(write_config(tmp_path, "fresh", workers=1))
    kill_before(tmp_path, list(range(1, total + 1)))


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    process = start(write_config(tmp_path, "out", workers=2))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.parent.exists():
        process.wait()
        pytest.skip("needs /proc to see the children of a process")
    workers: list[int] = []
    while process.poll() is None and len(workers) < 2:
        workers = list(map(int, children.read_text().split()))
    assert len(workers) == 2
    process.kill()
    process.wait()
    for _ in range(200):
        left = [pid for pid in workers if Path(f"/proc/{pid}/cmdline").exists()]
        left = [pid for pid in left if Path(f"/proc/{pid}/cmdline").read_bytes()]
        if not left:
            break
        time.sleep(0.05)
    assert not left
