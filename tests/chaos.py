"""The fault campaign: ``make chaos``, or ``python -m tests.chaos --times 20 --out FILE``.

Two ranks train a tiny model; something is broken at a random moment; the same command is started
again until the run ends. Nothing may be lost and nothing may be silently wrong: the final weights
have to be, bit for bit, those of a run that nobody disturbed (for windows that were dropped: those
of a run in one process that dropped the same), every refusal has to be one clear line, and nothing
may hang.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mamba3_lite import hardware
from mamba3_lite.utils.checkpoint import CheckpointManager
from tests import ranks, runs

RANKS = 2
MODES = ("ddp", "fsdp")
WINDOWS = 60
SETTINGS: dict[str, Any] = {
    "batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 24, "save_every": 3,
    "keep_last": 3, "eval_interval": 4, "rank_timeout_sec": 30.0, "log_every": 2,
}  # fmt: skip
PATIENCE_SEC = 90.0


class Wrong(Exception):
    """What the run did that it must not."""


@dataclasses.dataclass
class Room:
    """One experiment: a folder with data of its own, and what an undisturbed run gives."""

    folder: Path
    rng: random.Random
    undisturbed: dict[str, Path]  # run folder by mode
    mode: str = "ddp"

    @property
    def quiet(self) -> Path:
        return self.undisturbed[self.mode]

    def changes(self, **more: Any) -> dict[str, Any]:
        self.mode = self.rng.choice(MODES)
        layout = self.rng.choice(("files", "sharded"))
        return {**SETTINGS, "parallel_mode": self.mode, "checkpoint_format": layout, **more}

    def start(self, changes: dict[str, Any], **told: Any) -> list[subprocess.Popen]:
        """The ranks of the run, each told what to break."""
        val = str(self.folder / "val.bin")
        job = ["run", {"val_data_path": val, **changes, "_": told}]
        return ranks.start(
            RANKS, ["-m", "tests.rank_jobs", str(self.folder), json.dumps([job]), "--cli"]
        )

    def end(self, processes: list[subprocess.Popen], *, kill_rest: bool = True) -> list[int]:
        """Exit codes. As torchrun does, what is left when one has failed is ended."""
        deadline = time.monotonic() + PATIENCE_SEC
        while any(p.poll() is None for p in processes):
            if kill_rest and any(p.poll() for p in processes):
                time.sleep(0.3)
                for p in processes:
                    p.kill()
            if time.monotonic() > deadline:
                for p in processes:
                    p.kill()
                raise Wrong(f"no end within {PATIENCE_SEC:.0f} s")
            time.sleep(0.02)
        self.said = ["".join(p.communicate()) for p in processes]
        return [p.returncode for p in processes]

    def go_on(self, changes: dict[str, Any]) -> None:
        """The same command again; it has to end well."""
        codes = self.end(self.start(changes))
        if codes != [0] * RANKS:
            raise Wrong(f"going on ended with {codes}: {self.said[0][-400:]}")

    def same_as_quiet(self) -> None:
        mine, theirs = (
            CheckpointManager(f, log=_silent).load(None) for f in (self.run, self.quiet)
        )
        assert mine is not None and theirs is not None
        if mine.opt_step != theirs.opt_step:
            raise Wrong(f"ended at opt_step {mine.opt_step}, not {theirs.opt_step}")
        try:
            runs.assert_same_weights(mine.model, theirs.model)
        except AssertionError:
            raise Wrong("other weights than those of the undisturbed run") from None
        if runs.losses(self.run) != runs.losses(self.quiet):
            raise Wrong("other losses in the log than those of the undisturbed run")

    @property
    def run(self) -> Path:
        return self.folder / "run" / "run"

    def wait_for(self, opt_step: int, processes: list[subprocess.Popen]) -> None:
        """Until a checkpoint of that step is there, or the run has ended."""
        deadline = time.monotonic() + PATIENCE_SEC
        while time.monotonic() < deadline and all(p.poll() is None for p in processes):
            steps = [int(p.stem.rpartition("_")[2]) for p in self.run.glob("meta_step_*.json")]
            if max(steps, default=0) >= opt_step:
                return
            time.sleep(0.01)


def _silent(line: str) -> None:
    pass


def kill_some(room: Room, *, everyone: bool) -> None:
    changes = room.changes()
    processes = room.start(changes)
    room.wait_for(room.rng.choice((3, 6, 9, 12, 15)), processes)
    time.sleep(room.rng.uniform(0, 0.15))
    for process in processes if everyone else [room.rng.choice(processes)]:
        process.kill()
    room.end(processes)
    room.go_on(changes)
    room.same_as_quiet()


def terminate(room: Room, *, moment: str) -> None:
    changes = room.changes()
    told = {
        "term_in": moment,
        "term_at": room.rng.randrange(1, 5),
        "rank": room.rng.randrange(RANKS),
    }
    codes = room.end(room.start(changes, **told), kill_rest=False)
    if codes != [143] * RANKS:
        raise Wrong(f"SIGTERM ended in {codes}: {room.said[0][-300:]}")
    room.go_on(changes)
    room.same_as_quiet()


def not_finite(room: Room, *, kind: str) -> None:
    """A window with NaN on one rank is dropped by both: as one process that drops it."""
    where = room.rng.randrange(4, 40)
    told: dict[str, Any] = {"rank": room.rng.randrange(RANKS)}
    told |= {"nan_loss_at": where} if kind == "loss" else {"nan_gradient_at": [where]}
    codes = room.end(room.start(room.changes(), **told))
    if codes != [0] * RANKS:
        raise Wrong(f"ended with {codes}: {room.said[0][-300:]}")
    found = [json.loads((room.folder / "run" / f"rank_{r}.json").read_text()) for r in range(RANKS)]
    if [one["state"]["dropped_windows"] for one in found] != [1] * RANKS:
        raise Wrong("not exactly one window was dropped by every rank")
    if len({one["weights"] for one in found}) != 1:
        raise Wrong("the ranks ended with different weights")


def always_not_finite(room: Room) -> None:
    """A batch that is NaN whenever it comes: back to a checkpoint, past it, and to the end."""
    per_step = RANKS * SETTINGS["batch_size"] * SETTINGS["gradient_accumulation_steps"]
    first = per_step * room.rng.randrange(3, 6)
    told = {"nan_samples": [first + room.rng.randrange(per_step), first + per_step]}
    changes = room.changes(nan_guard_max_consecutive=2, max_rollbacks=3)
    codes = room.end(room.start(changes, **told))
    if codes != [0] * RANKS:
        raise Wrong(f"ended with {codes}: {room.said[0][-300:]}")
    found = [json.loads((room.folder / "run" / f"rank_{r}.json").read_text()) for r in range(RANKS)]
    if len({one["weights"] for one in found}) != 1 or not found[0]["state"]["skip_spans"]:
        raise Wrong("no span was skipped, or the ranks ended with different weights")
    checkpoint = CheckpointManager(room.run, log=_silent).load(None)
    if checkpoint is None or checkpoint.opt_step != SETTINGS["max_steps"]:
        raise Wrong("the run did not reach its end")


def full_disk(room: Room) -> None:
    changes = room.changes()
    told = {"full_at": room.rng.randrange(1, 12), "rank": 0}
    codes = room.end(room.start(changes, **told))
    said = "".join(room.said)
    if "No space left" not in said:
        raise Wrong("the failure was not told")
    if codes != [0] * RANKS:  # it was the last checkpoint that did not fit
        if sorted(set(codes)) != [2] or "Traceback" in said:
            raise Wrong(f"ended with {codes}: {said[-300:]}")
        room.go_on(changes)
    room.same_as_quiet()


def damage(room: Room, *, kind: str) -> None:
    changes = room.changes()
    processes = room.start(changes)
    room.wait_for(9, processes)
    for process in processes:
        process.kill()
    room.end(processes)
    newest = max(CheckpointManager(room.run).steps())
    files = [p for p in room.run.rglob("*") if p.is_file() and f"_step_{newest}" in str(p)]
    path = room.rng.choice(sorted(files))
    if kind == "truncated":
        os.truncate(path, room.rng.randrange(path.stat().st_size))
    elif kind == "flipped":
        content = bytearray(path.read_bytes())
        content[room.rng.randrange(len(content))] ^= 1 << room.rng.randrange(8)
        path.write_bytes(content)
    else:
        path.unlink()
    room.go_on(changes)
    if path.name.startswith("meta") is False and "passed over" not in room.said[0]:
        raise Wrong(f"{path.name} was {kind} and nobody said so")
    room.same_as_quiet()


def cut_data(room: Room) -> None:
    """A shard loses its end while it is read: the run may stop, and must not go on with zeros."""
    changes = room.changes()
    data = room.folder / "train.bin"
    whole = data.read_bytes()
    processes = room.start(changes)
    room.wait_for(room.rng.choice((3, 6)), processes)
    with data.open("r+b") as file:
        file.truncate(room.rng.randrange(len(whole) // 2, len(whole)))
    codes = room.end(processes)
    if codes == [0] * RANKS:
        room.same_as_quiet()  # what was cut had been read already
        return
    codes = room.end(room.start(changes))
    if 0 in codes or "Traceback" in "".join(room.said):
        raise Wrong(f"cut data were taken: {codes}, {room.said[0][-300:]}")
    data.write_bytes(whole)
    room.go_on(changes)
    room.same_as_quiet()


def two_jobs(room: Room) -> None:
    changes = room.changes(max_steps=100_000, eval_interval=0, val_data_path="", log_every=1000)
    first = room.start(changes)
    room.wait_for(room.rng.choice((3, 30)), first)
    codes = room.end(room.start(changes), kill_rest=False)
    refused = "".join(room.said)
    if codes != [2] * RANKS or refused.count("in use by another job") != 1:
        raise Wrong(f"the second job ended with {codes}: {refused[-300:]}")
    if any(p.poll() is not None for p in first):
        raise Wrong("the first job was harmed")
    room.rng.choice(first).terminate()
    if room.end(first, kill_rest=False) != [143] * RANKS:
        raise Wrong(f"the first job could not be stopped: {room.said[0][-300:]}")
    reason = CheckpointManager(room.run).verify(max(CheckpointManager(room.run).steps()))
    if reason is not None:
        raise Wrong(f"the first job's last checkpoint is not intact: {reason}")


FAULTS: dict[str, Callable[[Room], None]] = {
    "SIGKILL of one rank": lambda room: kill_some(room, everyone=False),
    "SIGKILL of all ranks": lambda room: kill_some(room, everyone=True),
    "SIGTERM in training": lambda room: terminate(room, moment="training"),
    "SIGTERM inside an accumulation window": lambda room: terminate(room, moment="accumulation"),
    "SIGTERM in validation": lambda room: terminate(room, moment="validation"),
    "SIGTERM in a save": lambda room: terminate(room, moment="saving"),
    "NaN loss on one rank": lambda room: not_finite(room, kind="loss"),
    "NaN gradient on one rank": lambda room: not_finite(room, kind="gradient"),
    "a batch that is always NaN": always_not_finite,
    "disk full in a save": full_disk,
    "a checkpoint file truncated": lambda room: damage(room, kind="truncated"),
    "a checkpoint file with a flipped bit": lambda room: damage(room, kind="flipped"),
    "a checkpoint file deleted": lambda room: damage(room, kind="deleted"),
    "a data file cut while it is read": cut_data,
    "two jobs in one folder": two_jobs,
}


def furnish(folder: Path) -> None:
    """Data of one experiment."""
    folder.mkdir(parents=True)
    runs.write_tokens(folder / "train.bin", 24 * WINDOWS + 1)
    runs.write_tokens(folder / "val.bin", 24 * 7 + 1, seed=1)


def undisturbed(folder: Path) -> dict[str, Path]:
    """The runs that all others are held to."""
    found = {}
    for mode in MODES:
        furnish(folder / mode)
        room = Room(folder / mode, random.Random(0), {})
        room.go_on({**SETTINGS, "parallel_mode": mode})
        found[mode] = room.run
    return found


def experiment(name: str, seed: int, quiet: dict[str, Path], folder: Path) -> str | None:
    """What went wrong, or None."""
    furnish(folder)
    room = Room(folder, random.Random(f"{name} {seed}"), quiet)
    try:
        FAULTS[name](room)
    except Wrong as problem:
        return f"{problem} ({room.mode})"
    shutil.rmtree(folder)
    return None


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--times", type=int, default=20, help="of each fault")
    ap.add_argument("--only", help="faults whose name holds this")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", type=Path, help="appends a JSON row")
    args = ap.parse_args()
    names = [name for name in FAULTS if args.only is None or args.only in name]
    counts, problems, start = {}, [], time.time()
    with tempfile.TemporaryDirectory() as work:
        quiet = undisturbed(Path(work) / "quiet")
        for name in names:
            wrong = 0
            for seed in range(args.seed, args.seed + args.times):
                folder = Path(work) / f"{names.index(name)}-{seed}"
                problem = experiment(name, seed, quiet, folder)
                if problem is not None:
                    wrong += 1
                    problems.append(f"{name}, seed {seed}: {problem}")
                    print(f"WRONG {problems[-1]}", flush=True)
            counts[name] = {"injected": args.times, "wrong": wrong}
            print(f"{name}: {args.times} injected, {wrong} wrong", flush=True)
    if args.out is not None:
        row = {
            "benchmark": "chaos", "ranks": RANKS, "seed": args.seed, "counts": counts,
            "problems": problems, "sec": round(time.time() - start),
            "environment": hardware.environment_record(),
        }  # fmt: skip
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
