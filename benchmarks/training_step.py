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
from mamba3_lite.errors import UserError
from mamba3_lite.measure import bench_cases
from mamba3_lite.measure.bench_cases import StepLoop
from mamba3_lite.models.arithmetic import model_flops_per_token
from mamba3_lite.training.config import TrainingConfig

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
    try:
        return bench_cases.parity_errors(dispatch, device)
    except UserError as problem:
        sys.exit(str(problem))


def milliseconds(loop: StepLoop, opt_steps: int) -> tuple[list[float], float]:
    """Each optimizer step's time between events on the device, and the last loss."""
    timed = bench_cases.milliseconds(loop.opt_step, opt_steps, loop.window.device)
    loop.settle()
    return timed, float(loop.loss)


def profile(loop: StepLoop, opt_steps: int = 3) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel, the gaps between kernels included."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    loop.opt_step()
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
    config = TrainingConfig(
        model_config={"ssd_dispatch": dispatch}, grad_checkpoint=recompute, batch_size=args.batch,
        max_seq_len=args.length, compile_model=mode != "eager", compile_mode=mode,
    )  # fmt: skip
    loop = StepLoop(config, device)
    start = time.perf_counter()
    first_loss = float(loop.opt_step())
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
        "mfu": round(model_flops_per_token(config.model()) * tps / peak, 4) if peak else None,
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
