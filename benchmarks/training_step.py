"""Times whole training steps at the production shape, one row a variant.

    python benchmarks/training_step.py --variant rotated:default:1 \\
        --out benchmarks/results/training_step.jsonl

Nothing is timed before the SSD path has passed parity on this device. A variant is dispatch:compile
mode (or eager):gradient checkpointing (0 or 1). A row states the machine, the versions, the commit,
the median and the spread of the timed steps, the seconds of the first step (compilation included)
and the peak memory.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mamba3_lite import hardware
from mamba3_lite.measure import parity
from mamba3_lite.models import ssd_backends
from mamba3_lite.models.arithmetic import model_flops_per_token
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.optim import build_optimizer
from mamba3_lite.training.pretrain import TrainingConfig, compile_blocks, train_step
from mamba3_lite.training.schedule import build_schedule


def parity_or_exit(dispatch: str, device: torch.device) -> dict[str, float]:
    """Errors of the path against the oracle; a number from a wrong path is worth nothing."""
    problem = parity.Problem(2048, None, parity.DECAYS[0], False, False)
    result = parity.check(ssd_backends.BACKENDS[dispatch].run, problem, 64, torch.float32, device)
    failures = result.failures(problem, torch.float32)
    if failures:
        sys.exit(f"{dispatch}: parity failed ({'; '.join(failures)}): nothing is timed")
    return {name: float(f"{error:.2e}") for name, error in result.errors.items()}


def measure(variant: str, batch: int, length: int, opt_steps: int, device: torch.device) -> dict:
    """One row."""
    dispatch, mode, checkpointed = variant.split(":")
    errors = parity_or_exit(dispatch, device)
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    cfg = ModelConfig(ssd_dispatch=dispatch, grad_checkpoint=checkpointed == "1")
    model = Mamba3Transformer(cfg).to(device).train()
    if mode != "eager":
        compile_blocks(model, mode)
    config = TrainingConfig(batch_size=batch, gradient_accumulation_steps=1)
    optimizer = build_optimizer(model, config)
    scheduler = build_schedule(optimizer, config)
    amp = torch.autocast("cuda", dtype=torch.bfloat16)
    window = torch.randint(0, cfg.vocab_size, (batch, length + 1), device=device)
    seconds, losses = [], []
    for opt_step in range(opt_steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        metrics, _ = train_step(
            model, optimizer, scheduler, config, amp, print, opt_step,
            window[:, :-1], window[:, 1:], opt_step,
        )  # fmt: skip
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(metrics["loss"]) if metrics is not None else float("nan"))
    timed = sorted(seconds[3:])
    median = timed[len(timed) // 2]
    tps = batch * length / median
    peak = hardware.peak_bf16_flops(hardware.device_name(device))
    return {
        "benchmark": "training_step",
        "dispatch": dispatch,
        "compile": mode,
        "grad_checkpoint": checkpointed == "1",
        "micro_batch": batch,
        "seq_len": length,
        "median_ms": round(1e3 * median, 2),
        "min_ms": round(1e3 * timed[0], 2),
        "max_ms": round(1e3 * timed[-1], 2),
        "timed_opt_steps": len(timed),
        "tokens_per_sec": round(tps),
        "mfu": round(model_flops_per_token(cfg) * tps / peak, 4) if peak else None,
        "first_step_sec": round(seconds[0], 2),
        "peak_mem_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
        "parity_relative_l2": errors,
    }


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--variant", action="append", required=True)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=2048)
    ap.add_argument("--opt-steps", type=int, default=10)
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()
    if not torch.cuda.is_available():
        sys.exit("training_step needs a CUDA device")
    environment = hardware.environment_record()
    if args.commit:
        environment["git"] = {"commit": args.commit, "dirty": False}
    for variant in args.variant:
        row = measure(variant, args.batch, args.length, args.opt_steps, torch.device("cuda"))
        row["environment"] = environment
        row["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {k: v for k, v in row.items() if k not in ("environment", "parity_relative_l2")}
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
