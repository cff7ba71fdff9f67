"""Learning curves of the knobs that a speed cannot judge: one small model, one change a run.

    python benchmarks/tuning_curves.py --data data/mix/train --val-data data/mix/val --jobs 12 \\
        --out benchmarks/results/tuning_curves.jsonl

The run `base` has the settings of BASE; every other one differs from it as RUNS says, the most
important first. All go at once, since a small model waits for its launches: the losses count, the
speed does not. A run has its row as soon as it ends, so that a program that is stopped loses no
more than what was under way; one that fails has a row that says how. The data, and for one seed
their order, are the same in all. --picture draws the rows, elsewhere too (see plots.py).

More arguments are settings of every run, such as model.n_layers=2.
"""

import argparse
import contextlib
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import loss_curves
import plots
import rows

from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.models.arithmetic import parameter_count
from mamba3_lite.training.config import TrainingConfig, load_training_config
from mamba3_lite.training.stop import EXIT_OUT_OF_TIME
from mamba3_lite.utils.logging import read_metrics

BASE = {
    "model.ssd_dispatch": "fused", "training.micro_batch_size": 4, "training.lr": 3e-4,
    "training.warmup_steps": 100, "training.min_lr_ratio": 0.05, "training.seed": 0,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "chunk 64": {"model.ssd_dispatch": "rotated", "model.chunk_size": 64},
    "chunk 128": {"model.ssd_dispatch": "rotated", "model.chunk_size": 128},
    "base": {},
    "lr 1.5e-4": {"training.lr": 1.5e-4},
    "lr 6e-4": {"training.lr": 6e-4},
    "lr 1.2e-3": {"training.lr": 1.2e-3},
    "seed 1": {"training.seed": 1},
    "warm-up 0": {"training.warmup_steps": 0},
    "warm-up 500": {"training.warmup_steps": 500},
    "floor 0": {"training.min_lr_ratio": 0.0},
    "floor 0.5": {"training.min_lr_ratio": 0.5},
    "lr 1e-2": {"training.lr": 1e-2},
}


def folder_of(name: str) -> str:
    return name.replace(" ", "_")


def command(name: str, config: Path, args: argparse.Namespace) -> list[str]:
    """Trains one run beside its configuration file."""
    settings = [f"{key}={value}" for key, value in {**BASE, **RUNS[name]}.items()]
    words = [
        sys.executable, "-m", "mamba3_lite.cli", "pretrain", "--config", str(config),
        "--checkpoint-dir", str(config.parent / folder_of(name)), *settings, *args.overrides,
    ]  # fmt: skip
    return [*words, "--max-time", str(args.max_time)] if args.max_time is not None else words


def outcome(folder: Path) -> dict[str, Any]:
    """What a run has logged: its losses by optimizer step, and all that went wrong."""
    logged = read_metrics(folder / "metrics.jsonl") if folder.is_dir() else []
    trained = [row for row in logged if row["kind"] == "train"]
    validated = [row["val_loss"] for row in logged if row["kind"] == "val"]
    events = Counter(row["event"] for row in logged if row["kind"] == "event")
    return {
        "val_loss": validated[-1] if validated else None,
        "last_opt_step": max((row["opt_step"] for row in trained), default=0),
        "dropped_windows": max((row["dropped_windows"] for row in trained), default=0),
        "events": dict(events),
        "curve": [
            [row["opt_step"], round(row["loss"], 5)]
            for row in trained
            if row["loss"] is not None and math.isfinite(row["loss"])
        ],
    }


def ending(code: int, log: Path) -> str:
    """In words; of a run that failed, the last line it said."""
    if code in (0, EXIT_OUT_OF_TIME):
        return "finished" if code == 0 else "out of time"
    return f"failed: {['', *loss_curves.last_words(log)][-1]}"


def shared_facts(config: TrainingConfig, args: argparse.Namespace) -> dict[str, Any]:
    """What all rows have in common."""
    data = PretrainDataset(args.data, config.max_seq_len, config.vocab_size)
    return {
        "benchmark": "tuning_curve",
        "opt_steps": args.opt_steps,
        "tokens_per_opt_step": config.tokens_per_step,
        "parameters": parameter_count(config.model()),
        "base": BASE,
        "overrides": args.overrides,
        "model": {**loss_curves.MODEL, **config.model_config},
        "training": loss_curves.TRAINING,
        "data": {"tokens": data.n_tokens, "fingerprint": data.fingerprint, "order": "shuffled"},
        "jobs": args.jobs,
    }


def train_all(args: argparse.Namespace, work: Path) -> None:
    """Appends a row as each run ends."""
    facts = rows.environment(args.commit)
    config = work / "run.yaml"
    settings = loss_curves.settings(args.data, args.val_data, args.opt_steps)
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    base = [f"{key}={value}" for key, value in BASE.items()]
    shared = shared_facts(load_training_config(config, [*base, *args.overrides])[0], args)
    names = {folder_of(name): name for name in args.only}
    commands = {folder: command(name, config, args) for folder, name in names.items()}
    with contextlib.closing(loss_curves.finished(commands, work, args.jobs)) as ended:
        for folder, seconds, code in ended:
            row = {
                **shared,
                "name": names[folder],
                "changed": RUNS[names[folder]],
                "run_sec": seconds,
                "ended": ending(code, work / f"{folder}.log"),
                **outcome(work / folder),
            }
            rows.append(args.out, row, facts, hide=("curve", "model", "training", "base"))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("overrides", nargs="*", help="section.key=value for every run")
    ap.add_argument("--data", type=Path, required=True, help="training shards, a folder")
    ap.add_argument("--val-data", type=Path, required=True, help="validation shards, a folder")
    ap.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS, metavar="NAME")
    ap.add_argument("--opt-steps", type=int, default=2000)
    ap.add_argument("--jobs", type=int, default=len(RUNS), help="runs at once")
    ap.add_argument("--max-time", type=float, help="every run stops after so many seconds")
    ap.add_argument("--picture", type=Path, metavar="PNG")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path, required=True)
    return ap.parse_args(argv)


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as work:
        train_all(args, Path(work))
    if args.picture is not None:
        plots.draw(args.out, args.picture)


if __name__ == "__main__":
    main()
