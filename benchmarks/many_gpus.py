"""Times training over the GPUs of one host, one row a run: DDP, FSDP2, and what a save costs.

    python benchmarks/many_gpus.py --ranks 1 2 --out benchmarks/results/many_gpus.jsonl

The first run is a process of its own, without torchrun and without a wrapper; every other one is
compared with it. Each is the command that a user would start, on random tokens: a configuration
(the production one unless --config names another) with one micro-step an optimizer step, since
that is where exchanges weigh most. Speed is the median of the log rows after the first ones;
efficiency is tokens a second over those of the first run, for each rank.

With --save every run writes one sharded checkpoint halfway. save_sec is how much longer the loop
took from there to the end than it would have at its pace before, while the save went on beside it;
save_share is its part of the time between two saves as the configuration spaces them. The save at
the end of a run is not timed.

What has to be equal over ranks is checked by tests: tests/gpu/test_many_gpus_gpu.py. More arguments
are settings of all runs, such as training.micro_batch_size=8. Without a GPU everything runs over
gloo, which tries the script and says nothing about speed.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows

from mamba3_lite.errors import UserError
from mamba3_lite.models.arithmetic import parameter_count
from mamba3_lite.training.config import TrainingConfig, load_training_config
from mamba3_lite.utils.logging import read_metrics

ROOT = Path(__file__).resolve().parents[1]
MODES = ("ddp", "fsdp")
# The fabric's multicast is not everywhere in order, and no collective here needs it.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip


class Run(NamedTuple):
    """What is timed; mode None: one process without torchrun."""

    ranks: int
    mode: str | None

    @property
    def name(self) -> str:
        return f"{self.mode or 'alone'}-{self.ranks}"

    def command(self, config: Path, folder: Path, settings: Sequence[str]) -> list[str]:
        words = ["-m", "mamba3_lite.cli", "pretrain", "--config", str(config)]
        words += ["--checkpoint-dir", str(folder), *settings]
        if self.mode is None:
            return [sys.executable, *words]
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc_per_node", str(self.ranks), *words, f"parallel.mode={self.mode}"]
        return [sys.executable, *torchrun]


def runs_of(ranks: Sequence[int], modes: Sequence[str]) -> Iterator[Run]:
    yield Run(1, None)
    yield from itertools.starmap(Run, itertools.product(ranks, modes))


def settings_of(args: argparse.Namespace, data: Path) -> list[str]:
    """Of every run."""
    save = args.opt_steps // 2 if args.save else args.opt_steps
    found = [
        f"training.total_steps={args.opt_steps}", f"training.log_interval={args.row}",
        f"training.save_interval={save}", "training.gradient_accumulation_steps=1",
        "training.warmup_steps=2", "training.eval_interval=0", "training.tensorboard=false",
        f"data.train_data_path={data}", "data.val_data_path=",
    ]  # fmt: skip
    return [*found, *(["training.checkpoint_format=sharded"] if args.save else []), *args.overrides]


def speed(logged: Sequence[dict[str, Any]], skip: int) -> dict[str, Any]:
    """From the log rows of a run, without the first ones."""
    rates = sorted(row["tps"] for row in logged[skip:])
    return {
        "tokens_per_sec": round(median(rates)), "min_tokens_per_sec": round(rates[0]),
        "max_tokens_per_sec": round(rates[-1]), "rows": len(rates),
    }  # fmt: skip


def save_cost(logged: Sequence[dict[str, Any]], skip: int, saved_at: int) -> float:
    """Seconds that the rows behind a save took longer than so many of those before it."""
    late = [row for row in logged if row["opt_step"] > saved_at]
    early = [row for row in logged[skip:] if row["opt_step"] <= saved_at]
    if len(early) < 3 or not late:
        sys.exit("--save needs more log rows: more --opt-steps, or a smaller --row")
    pace = median(after["time"] - before["time"] for before, after in itertools.pairwise(early))
    return late[-1]["time"] - early[-1]["time"] - len(late) * pace


def measure(
    run: Run, args: argparse.Namespace, config: TrainingConfig, work: Path, settings: list[str]
) -> dict[str, Any]:
    """One row; the program ends with what the run said if it failed."""
    folder, log = work / run.name, work / f"{run.name}.log"
    start = time.perf_counter()
    with log.open("w") as said:
        done = subprocess.run(
            run.command(args.config, folder, settings), cwd=ROOT, stdout=said,
            stderr=subprocess.STDOUT, check=False,
            env={**NO_MULTICAST, **os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{run.name} failed:\n{log.read_text(encoding='utf-8')[-3000:]}")
    logged = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    last = logged[-1]
    row = {
        "benchmark": "many_gpus", "ranks": run.ranks, "mode": run.mode or "alone",
        "parameters": parameter_count(config.model()), "micro_batch": config.batch_size,
        "seq_len": config.max_seq_len, "opt_steps": args.opt_steps, "overrides": args.overrides,
        **speed(logged, args.skip),
        "peak_mem_gib": last["peak_mem_gib"],
        "least_peak_mem_gib": last.get("least_peak_mem_gib", last["peak_mem_gib"]),
        "longest_wait_sec": last.get("longest_wait_sec"),
        "wall_sec": round(time.perf_counter() - start, 1),
        "losses": [logged[0]["loss"], last["loss"]],
    }  # fmt: skip
    if args.save:
        row["save_sec"] = round(save_cost(logged, args.skip, args.opt_steps // 2), 3)
        step_sec = run.ranks * config.tokens_per_micro_step / row["tokens_per_sec"]
        row["save_share"] = row["save_sec"] / (config.save_every * step_sec)
    return row


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("overrides", nargs="*", help="section.key=value for every run")
    ap.add_argument("--config", type=Path, default=ROOT / "configs" / "pretrain_h200_434m.yaml")
    ap.add_argument("--ranks", type=int, nargs="+", default=[1])
    ap.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    ap.add_argument("--opt-steps", type=int, default=60)
    ap.add_argument("--row", type=int, default=5, help="optimizer steps of a log row")
    ap.add_argument("--skip", type=int, default=2, help="rows that do not count, the first ones")
    ap.add_argument("--save", action="store_true", help="with a sharded checkpoint halfway")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path, required=True)
    return ap.parse_args(argv)


def main() -> None:
    args = arguments()
    try:
        config, _ = load_training_config(args.config, args.overrides)
    except UserError as problem:
        sys.exit(f"many_gpus: {problem}")
    facts = rows.environment(args.commit)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        count = args.opt_steps * max(args.ranks) * config.tokens_per_micro_step + 1
        torch.save(torch.randint(config.vocab_size, (count,)), work / "tokens.bin")
        settings = settings_of(args, work / "tokens.bin")
        alone = None
        for run in runs_of(args.ranks, args.modes):
            row = measure(run, args, config, work, settings)
            alone = alone or row["tokens_per_sec"]
            row["efficiency"] = round(row["tokens_per_sec"] / (run.ranks * alone), 4)
            rows.append(args.out, row, facts)


if __name__ == "__main__":
    main()
