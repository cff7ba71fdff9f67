"""Times whole training steps at the production shape, one row a variant.

    python benchmarks/training_step.py --variant fused:default:0 \\
        --out benchmarks/results/training_step.jsonl

Nothing is timed before the SSD path has passed parity on this device. A variant is dispatch:compile
mode (or eager):gradient checkpointing (0, 1 or selective). A row states the machine, the versions,
the commit, the median and the spread of the timed steps, the seconds of the first step (compilation
included) and the peak memory. --profile adds where the time of a step goes, by kind of kernel;
--transformer FILE times another script of this kind in the same run and keeps what it prints.
"""

import argparse
import json
import re
import subprocess
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
from mamba3_lite.training.guard import AccumulationWindow
from mamba3_lite.training.optim import build_optimizer
from mamba3_lite.training.pretrain import TrainingConfig, compile_blocks, train_step
from mamba3_lite.training.schedule import build_schedule
from mamba3_lite.training.step import settle

WARM_UP_OPT_STEPS = 3
# The first pattern found in a kernel's name decides.
KINDS = (
    ("SSD", r"phase_kernel|carry_kernel|output_kernel|gradient_kernel"),
    ("cross-entropy", r"cross_entropy"),
    ("optimizer and norm", r"adam|Adam|lpnorm|LpNorm|multi_tensor"),
    ("matrix products", r"gemm|cutlass|nvjet|cublas|wgmma|xmma"),
    ("embedding", r"embedding|indexing_backward|index_put|sort|Sort|radix"),
    ("norm, residual, SwiGLU", r"triton_|swiglu"),
    ("copies and fills", r"Memcpy|Memset|copy|fill"),
)


def parity_or_exit(dispatch: str, device: torch.device) -> dict[str, dict[str, float]]:
    """Errors of the path against the oracle; a number from a wrong path is worth nothing."""
    problem = parity.Problem(2048, None, parity.DECAYS[0], False, False)
    shown = {}
    for dtype in parity.PRECISIONS.get(dispatch, (torch.float32,)):
        result = parity.check(ssd_backends.BACKENDS[dispatch].run, problem, 64, dtype, device)
        failures = result.failures(problem, dtype)
        if failures:
            sys.exit(f"{dispatch}: parity failed ({'; '.join(failures)}): nothing is timed")
        rounded = {name: float(f"{error:.2e}") for name, error in result.errors.items()}
        shown[str(dtype).removeprefix("torch.")] = rounded
    return shown


class Loop:
    """A model and all that one optimizer step needs."""

    def __init__(self, cfg: ModelConfig, mode: str, batch: int, length: int, device: torch.device):
        torch.manual_seed(0)
        self.model = Mamba3Transformer(cfg).to(device).train()
        if mode != "eager":
            compile_blocks(self.model, mode)
        self.config = TrainingConfig(batch_size=batch, gradient_accumulation_steps=1)
        self.optimizer = build_optimizer(self.model, self.config)
        self.scheduler = build_schedule(self.optimizer, self.config)
        self.amp = torch.autocast("cuda", dtype=torch.bfloat16)
        self.window = torch.randint(0, cfg.vocab_size, (batch, length + 1), device=device)
        AccumulationWindow.of(self.optimizer).late = True
        self.opt_steps = self.calls = 0

    def step(self) -> torch.Tensor:
        """One optimizer step; the loss, on the device."""
        metrics, self.opt_steps = train_step(
            self.model, self.optimizer, self.scheduler, self.config, self.amp, print,
            self.opt_steps, self.window[:, :-1], self.window[:, 1:], self.calls,
        )  # fmt: skip
        self.calls += 1
        assert metrics is not None
        return metrics["loss"]

    def settle(self) -> None:
        self.opt_steps = settle(self.optimizer, self.scheduler, print, self.opt_steps)


def milliseconds(loop: Loop, opt_steps: int) -> tuple[list[float], float]:
    """Each optimizer step's time between events on the device, and the last loss."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(opt_steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        loss = loop.step()
        mark.record()
    torch.cuda.synchronize()
    loop.settle()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)], float(loss)


def profile(loop: Loop, opt_steps: int = 3) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel, the gaps between kernels included."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    loop.step()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as record:
        milliseconds(loop, opt_steps)
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    spans = []
    for event in record.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        took = event.time_range.elapsed_us() / 1e3 / opt_steps
        kind = next((k for k, pattern in KINDS if re.search(pattern, event.name)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + took
        names[event.name] = names.get(event.name, 0.0) + took
        spans.append((event.time_range.start, event.time_range.end))
    whole = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3 / opt_steps
    kinds["gaps"] = whole - sum(kinds.values())
    for name, took in sorted(names.items(), key=lambda item: -item[1])[:40]:
        print(f"{took:8.3f} ms  {name[:110]}", file=sys.stderr)
    return {kind: round(took, 2) for kind, took in sorted(kinds.items(), key=lambda i: -i[1])}


def measure(variant: str, args: argparse.Namespace, device: torch.device) -> dict:
    """One row."""
    dispatch, mode, checkpointed = variant.split(":")
    errors = parity_or_exit(dispatch, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    recompute = {"0": False, "1": True}.get(checkpointed, checkpointed)
    cfg = ModelConfig(ssd_dispatch=dispatch, grad_checkpoint=recompute)
    loop = Loop(cfg, mode, args.batch, args.length, device)
    start = time.perf_counter()
    first_loss = float(loop.step())
    first_step_sec = time.perf_counter() - start
    milliseconds(loop, WARM_UP_OPT_STEPS)
    timed, last_loss = milliseconds(loop, args.opt_steps)
    timed.sort()
    median = timed[len(timed) // 2]
    tps = 1e3 * args.batch * args.length / median
    peak = hardware.peak_bf16_flops(hardware.device_name(device))
    row = {
        "benchmark": "training_step",
        "dispatch": dispatch,
        "compile": mode,
        "grad_checkpoint": recompute,
        "micro_batch": args.batch,
        "seq_len": args.length,
        "median_ms": round(median, 2),
        "min_ms": round(timed[0], 2),
        "max_ms": round(timed[-1], 2),
        "timed_opt_steps": len(timed),
        "tokens_per_sec": round(tps),
        "mfu": round(model_flops_per_token(cfg) * tps / peak, 4) if peak else None,
        "first_step_sec": round(first_step_sec, 2),
        "peak_mem_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": [round(first_loss, 4), round(last_loss, 4)],
        "parity_relative_l2": errors,
    }
    if args.profile:
        row["profile_ms"] = profile(loop)
    return row


def transformer(script: str, shapes: list[str]) -> dict:
    """What a peer's script prints, one line a shape."""
    done = subprocess.run(
        [sys.executable, script, *shapes], check=True, capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines()
    return {"benchmark": "transformer_peer", "script": Path(script).name, "printed": lines}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--variant", action="append", default=[])
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=2048)
    ap.add_argument("--opt-steps", type=int, default=10)
    ap.add_argument("--profile", action="store_true", help="where a step's time goes")
    ap.add_argument("--transformer", metavar="FILE", help="a peer's script, run first")
    ap.add_argument("--shape", action="append", default=[], help="MICRO_BATCH:SEQ_LEN for the peer")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()
    if not torch.cuda.is_available():
        sys.exit("training_step needs a CUDA device")
    environment = hardware.environment_record()
    if args.commit:
        environment["git"] = {"commit": args.commit, "dirty": False}
    jobs = [lambda: transformer(args.transformer, args.shape)] if args.transformer else []
    jobs += [lambda v=v: measure(v, args, torch.device("cuda")) for v in args.variant]
    for job in jobs:
        row = job()
        row["environment"] = environment
        row["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {k: v for k, v in row.items() if k not in ("environment", "parity_relative_l2")}
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
