"""A long life in small: ``python -m tests.soak``. Many steps, saves, validations and resumes.

The run is ended and started again several times. Memory, the number of files and the speed at the
end have to be those of the start. Speed is that of the processor's time, since what else runs on
the machine is no property of the run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mamba3_lite import hardware
from mamba3_lite.training.pretrain import Pretrainer
from tests import runs
from tests.ranks import ROOT

PAGE = os.sysconf("SC_PAGE_SIZE")
# Of a process, before its memory is looked at: allocators fill their pools.
WARM_UP = 0.4
MEMORY_SHARE, SPEED_SHARE = 0.03, 0.03


class Observed(Pretrainer):
    """Notes memory, files and processor time every ``every`` optimizer steps."""

    every = 0

    def _after_micro_step(self, last: int) -> bool:
        before = self.state.opt_step
        back = super()._after_micro_step(last)
        if self.state.opt_step != before and self.state.opt_step % self.every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            assert self.run_dir is not None
            row = {
                "opt_step": self.state.opt_step, "resident_mib": pages * PAGE / 2**20,
                "files": len(list(self.run_dir.iterdir())), "cpu_sec": time.process_time(),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
        return back


def child(folder: Path, changes: dict[str, Any], every: int) -> None:
    torch.set_num_threads(1)
    trainer = Observed(runs.config(folder, **changes))
    trainer.every = every
    raise SystemExit(trainer.train())


def live(folder: Path, opt_steps: int, lives: int) -> list[list[dict[str, float]]]:
    """What was observed, process by process; the run ends at ``opt_steps``."""
    runs.write_tokens(folder / "val.bin", 24 * 7 + 1, seed=1)
    every = opt_steps // (20 * lives)
    changes = {
        "max_steps": opt_steps, "save_every": every, "keep_last": 3, "log_every": 2 * every,
        "val_data_path": str(folder / "val.bin"), "eval_interval": 2 * every,
    }  # fmt: skip
    observed = []
    for part in range(1, lives + 1):
        rest = {**changes, "max_steps": opt_steps * part // lives}
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak", "--child", str(folder), json.dumps(rest),
             str(every)],
            cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        observed.append([json.loads(line) for line in lines])
    return observed


def judged(observed: list[list[dict[str, float]]]) -> tuple[dict[str, float], list[str]]:
    """The numbers that count, and what is wrong with them."""
    settled = [rows[int(WARM_UP * len(rows)) :] for rows in observed]
    growth = max(
        median(r["resident_mib"] for r in rows[-3:]) / median(r["resident_mib"] for r in rows[:3])
        for rows in settled
    )

    def speed(rows: list[dict[str, float]]) -> float:
        steps = rows[-1]["opt_step"] - rows[0]["opt_step"]
        return steps / (rows[-1]["cpu_sec"] - rows[0]["cpu_sec"])

    files = {row["files"] for rows in settled for row in rows}
    numbers = {
        "memory_growth": growth - 1,
        "resident_mib_first": settled[0][0]["resident_mib"],
        "resident_mib_last": settled[-1][-1]["resident_mib"],
        "files_most": max(files),
        "files_least": min(files),
        "opt_steps_per_cpu_sec_first": speed(settled[0]),
        "opt_steps_per_cpu_sec_last": speed(settled[-1]),
        "speed_change": speed(settled[-1]) / speed(settled[0]) - 1,
    }
    wrong = []
    if numbers["memory_growth"] > MEMORY_SHARE:
        wrong.append(f"memory grows by {numbers['memory_growth']:.1%} in one process")
    if len(files) > 1:
        wrong.append(f"the number of files changes: {sorted(files)}")
    if abs(numbers["speed_change"]) > SPEED_SHARE:
        wrong.append(f"speed changes by {numbers['speed_change']:+.1%}")
    return numbers, wrong


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--opt-steps", type=int, default=20_000)
    ap.add_argument("--lives", type=int, default=4, help="processes, one after the other")
    ap.add_argument("--out", type=Path, help="appends a JSON row")
    ap.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.child:
        child(Path(args.child[0]), json.loads(args.child[1]), int(args.child[2]))
    with tempfile.TemporaryDirectory() as folder:
        numbers, wrong = judged(live(Path(folder), args.opt_steps, args.lives))
    row = {
        "benchmark": "soak", "opt_steps": args.opt_steps, "lives": args.lives,
        **{name: round(value, 4) for name, value in numbers.items()}, "wrong": wrong,
        "environment": hardware.environment_record(),
    }  # fmt: skip
    print(json.dumps({k: v for k, v in row.items() if k != "environment"}, indent=1))
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
