"""Does the fused SSD in bfloat16 train like the plain one in float32? Loss curves, paired.

    python benchmarks/loss_curves.py --data data/mix/train --val-data data/mix/val --jobs 6 \\
        --out benchmarks/results/loss_curves.jsonl --picture loss_curves.png

Each dispatch trains the same small model from each seed, on the same data in the same order: a seed
draws the initial weights and the order, so runs of one seed differ by the dispatch alone. Over the
last 500 optimizer steps the mean paired difference of every seed shall be at most 0.01 nat and
below the spread (largest minus smallest mean) of the reference's seeds. Several runs go at once,
since a small model waits for its launches: the losses count, the speed does not. The row keeps the
curves; where matplotlib is absent, the same picture comes from it elsewhere:

    python benchmarks/loss_curves.py --plot-only benchmarks/results/loss_curves.jsonl \\
        --picture loss_curves.png

More arguments are settings of the run, such as training.micro_batch_size=2.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import plots
import rows

from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.measure.stats import standard_error
from mamba3_lite.models.arithmetic import parameter_count
from mamba3_lite.training.config import load_training_config
from mamba3_lite.training.stop import EXIT_OUT_OF_TIME
from mamba3_lite.utils.logging import read_metrics

ROOT = Path(__file__).resolve().parents[1]
LAST_OPT_STEPS = 500
LIMIT_NAT = 0.01
MODEL = {
    "d_model": 256, "n_layers": 4, "n_heads": 4, "head_dim": 64, "state_dim": 64, "ffn_dim": 512,
    "max_seq_len": 2048, "chunk_size": 256,
}  # fmt: skip
TRAINING = {
    "micro_batch_size": 8, "gradient_accumulation_steps": 1, "warmup_steps": 200, "lr": 3e-4,
    "grad_checkpoint": False, "compile": True, "compile_mode": "default", "log_interval": 5,
    "keep_last": 1, "tensorboard": False,
}  # fmt: skip

Curve = dict[int, float]  # opt_step: mean loss since the row before


def settings(data: Path, val_data: Path | None, opt_steps: int) -> dict[str, Any]:
    """The YAML of every run; seed, dispatch and run folder come on the command line."""
    where = {"train_data_path": str(data.resolve()), "order": "shuffled"}
    if val_data is not None:
        where["val_data_path"] = str(val_data.resolve())
    training = {**TRAINING, "total_steps": opt_steps, "save_interval": opt_steps}
    return {"model": MODEL, "training": training, "data": where}


def finished(
    commands: dict[str, list[str]], logs: Path, jobs: int
) -> Iterator[tuple[str, float, int]]:
    """Runs all, so many at a time, which share the cores; closing it ends those that are left.

    Yields the name, the seconds and the exit code of each that has ended.
    """
    threads = str(max(1, (os.cpu_count() or 1) // min(jobs, len(commands))))
    shared = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    waiting = list(commands)
    running: dict[str, tuple[subprocess.Popen, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                with (logs / f"{name}.log").open("w") as log:
                    process = subprocess.Popen(
                        commands[name], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                        env={**os.environ, **shared},
                    )  # fmt: skip
                running[name] = (process, time.perf_counter())
            time.sleep(0.1)
            for name, (process, start) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    yield name, round(time.perf_counter() - start, 1), process.returncode
    finally:
        for process, _ in running.values():
            process.terminate()
            process.wait()


def last_words(log: Path) -> list[str]:
    """What a run said at its end, in lines."""
    return log.read_text(encoding="utf-8").splitlines()[-20:]


def train(commands: dict[str, list[str]], logs: Path, jobs: int) -> dict[str, float]:
    """Runs all, so many at a time; the seconds that each took.

    The first that fails ends the others and this program, with the last lines it said.
    """
    seconds = {}
    with contextlib.closing(finished(commands, logs, jobs)) as ended:
        for name, took, code in ended:
            if code not in (0, EXIT_OUT_OF_TIME):
                sys.exit("\n".join([f"the run {name} failed:", *last_words(logs / f"{name}.log")]))
            print(f"{name}: {took} s", file=sys.stderr, flush=True)
            seconds[name] = took
    return seconds


def curve(folder: Path) -> tuple[Curve, float | None]:
    """Losses of a run by optimizer step, and its last validation loss if there was one."""
    logged = read_metrics(folder / "metrics.jsonl")
    losses = {row["opt_step"]: row["loss"] for row in logged if row["kind"] == "train"}
    dropped = max(row["dropped_windows"] for row in logged if row["kind"] == "train")
    if dropped or None in losses.values():
        sys.exit(f"{folder.name} dropped {dropped} windows: its curve cannot be paired")
    validated = [row["val_loss"] for row in logged if row["kind"] == "val"]
    return losses, validated[-1] if validated else None


def compare(curves: dict[str, dict[int, Curve]], last_opt_steps: int) -> dict[str, Any]:
    """The verdict on curves by dispatch (reference first) and seed, where all runs have rows.

    Returns:
        ``pairs`` (seed, mean_nat, standard_error_nat of candidate minus reference), their mean
        over seeds, ``spread_nat`` of each dispatch (0 for a single seed) and ``met``.
    """
    reference, candidate = curves
    runs = [run for seeds in curves.values() for run in seeds.values()]
    common = sorted(set(runs[0]).intersection(*runs[1:]))
    late = [opt_step for opt_step in common if opt_step > common[-1] - last_opt_steps]
    if len(late) < 2:
        sys.exit("fewer than two rows to compare: more optimizer steps, or a smaller log_interval")
    tails = {
        dispatch: {seed: np.array([run[s] for s in late]) for seed, run in seeds.items()}
        for dispatch, seeds in curves.items()
    }
    differences = {seed: tail - tails[reference][seed] for seed, tail in tails[candidate].items()}
    spreads = {
        dispatch: float(np.ptp([tail.mean() for tail in seeds.values()]))
        for dispatch, seeds in tails.items()
    }
    over_seeds = np.mean(list(differences.values()), 0)
    largest = max(abs(float(d.mean())) for d in differences.values())
    return {
        "compared_opt_steps": [late[0], late[-1]],
        "compared_rows": len(late),
        "pairs": [
            {
                "seed": seed,
                "mean_nat": round(float(d.mean()), 6),
                "standard_error_nat": round(standard_error(d), 6),
            }
            for seed, d in differences.items()
        ],
        "mean_nat": round(float(over_seeds.mean()), 6),
        "standard_error_nat": round(standard_error(over_seeds), 6),
        "largest_nat": round(largest, 6),
        "limit_nat": LIMIT_NAT,
        "spread_nat": {dispatch: round(spread, 6) for dispatch, spread in spreads.items()},
        "met": largest <= LIMIT_NAT and largest < spreads[reference],
    }


def in_words(row: dict[str, Any]) -> str:
    first, last = row["compared_opt_steps"]
    return (
        f"{'met' if row['met'] else 'NOT met'}: from optimizer step {first} to {last} of "
        f"{row['opt_steps']}, {row['candidate']} - {row['reference']} is {row['mean_nat']:+.4f} +- "
        f"{row['standard_error_nat']:.4f} nat over {len(row['pairs'])} seeds, "
        f"{row['largest_nat']:.4f} at most for one; the limits are {row['limit_nat']} and the "
        f"spread of {row['spread_nat'][row['reference']]:.4f} between the seeds of "
        f"{row['reference']}"
    )


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Trains, compares, and returns the row."""
    config = work / "run.yaml"
    config.write_text(yaml.safe_dump(settings(args.data, args.val_data, args.opt_steps)))
    resolved, _ = load_training_config(config, args.overrides)
    seeds = dict(zip(args.dispatch, (args.seeds, args.candidate_seeds or args.seeds), strict=True))
    runs = {f"{d}-{seed}": (d, seed) for d in args.dispatch for seed in seeds[d]}
    commands = {}
    for name, (dispatch, seed) in runs.items():
        commands[name] = [
            sys.executable, "-m", "mamba3_lite.cli", "pretrain", "--config", str(config),
            "--checkpoint-dir", str(work / name), *args.overrides,
            f"model.ssd_dispatch={dispatch}", f"training.seed={seed}",
        ]  # fmt: skip
        if args.max_time is not None:
            commands[name] += ["--max-time", str(args.max_time)]
    seconds = train(commands, work, args.jobs)
    curves: dict[str, dict[int, Curve]] = {dispatch: {} for dispatch in args.dispatch}
    validation = {}
    for name, (dispatch, seed) in runs.items():
        curves[dispatch][seed], validation[name] = curve(work / name)
    data = PretrainDataset(args.data, resolved.max_seq_len, resolved.vocab_size)
    row = {
        "benchmark": "loss_curves",
        "reference": args.dispatch[0],
        "candidate": args.dispatch[1],
        "opt_steps": args.opt_steps,
        **compare(curves, args.last),
        "val_losses": validation,
        "parameters": parameter_count(resolved.model()),
        "model": {**MODEL, **resolved.model_config},
        "training": TRAINING,
        "overrides": args.overrides,
        "tokens_per_opt_step": resolved.tokens_per_step,
        "data": {"tokens": data.n_tokens, "fingerprint": data.fingerprint, "order": "shuffled"},
        "run_sec": seconds,
        "jobs": args.jobs,
        "curves": {
            dispatch: {
                str(seed): [[opt_step, round(loss, 5)] for opt_step, loss in run.items()]
                for seed, run in seeds.items()
            }
            for dispatch, seeds in curves.items()
        },
    }
    return {**row, "verdict": in_words(row)}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("overrides", nargs="*", help="section.key=value for every run")
    ap.add_argument("--data", type=Path, help="training shards, a folder")
    ap.add_argument("--val-data", type=Path, help="validation shards, a folder")
    ap.add_argument(
        "--dispatch", nargs=2, default=["pytorch", "fused"], metavar=("REFERENCE", "CANDIDATE")
    )
    ap.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ap.add_argument("--candidate-seeds", type=int, nargs="+", help="fewer of them")
    ap.add_argument("--opt-steps", type=int, default=2000)
    ap.add_argument("--last", type=int, default=LAST_OPT_STEPS, help="optimizer steps compared")
    ap.add_argument("--jobs", type=int, default=6, help="runs at once")
    ap.add_argument("--max-time", type=float, help="every run stops after so many seconds")
    ap.add_argument("--work", type=Path, help="keeps the run folders here; must not exist")
    ap.add_argument("--picture", type=Path, metavar="PNG")
    ap.add_argument("--plot-only", type=Path, metavar="FILE", help="picture of FILE's last row")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path)
    args = ap.parse_args(argv)
    if args.plot_only:
        if args.picture is None:
            ap.error("--plot-only needs --picture")
    elif args.data is None or args.out is None:
        ap.error("--data and --out are required")
    if set(args.candidate_seeds or ()) - set(args.seeds):
        ap.error("--candidate-seeds must be among --seeds")
    return args


def main() -> None:
    args = arguments()
    if args.plot_only:
        plots.draw(args.plot_only, args.picture)
        return
    facts = rows.environment(args.commit)
    if args.work is not None:
        args.work.mkdir(parents=True)
        row = measure(args, args.work.resolve())
    else:
        with tempfile.TemporaryDirectory() as work:
            row = measure(args, Path(work))
    rows.append(args.out, row, facts, hide=("curves", "model", "training"))
    if args.picture is not None:
        plots.draw(args.out, args.picture)


if __name__ == "__main__":
    main()
