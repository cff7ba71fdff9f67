"""Times whole training steps at the production shape, one row a variant.

    python benchmarks/training_step.py --variant fused:default:0 \\
        --variant rotated:default:1:chunk=128,batch=8 --out benchmarks/results/training_step.jsonl

Nothing is timed before the SSD path has passed parity on this device. A variant is dispatch:compile
mode (or eager):gradient checkpointing (0, 1 or selective), and then, if wanted, settings: batch,
length, chunk (size), accumulate (micro-steps), and stages and warps of the seeds' kernel. Several
run one after the other; --variants FILE holds one a line. A row states the machine, the versions,
the commit, the median and the spread of the timed steps, the seconds of the first step (compilation
included) and the peak memory; a variant that does not fit the memory has a row that says so.
--profile adds where the time of a step goes, by kind of kernel; --transformer FILE times another
script of this kind in the same run and keeps what it prints.
"""

import argparse
import contextlib
import functools
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows

from mamba3_lite import hardware
from mamba3_lite.errors import UserError
from mamba3_lite.measure import bench_cases
from mamba3_lite.measure.ab_run import compile_mode_in_effect
from mamba3_lite.measure.bench_cases import StepLoop
from mamba3_lite.models.arithmetic import model_flops_per_token
from mamba3_lite.models.ssd_backends import BACKENDS
from mamba3_lite.training.config import COMPILE_MODES, TrainingConfig

RECOMPUTE = {"0": False, "1": True, "selective": "selective"}
# How a setting of a variant is called in a row.
SETTINGS = {
    "batch": "micro_batch", "length": "seq_len", "chunk": "chunk_size",
    "accumulate": "accumulation", "stages": "num_stages", "warps": "num_warps",
}  # fmt: skip
LAUNCH_KNOBS = {
    "num_stages": "TRITON_PER_CHUNK_NUM_STAGES", "num_warps": "TRITON_PER_CHUNK_NUM_WARPS",
}  # fmt: skip
DEVICE = torch.device("cuda")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
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


@dataclass(frozen=True)
class Variant:
    """What is timed; the fields are those of a row."""

    dispatch: str
    compile: str  # a mode, or eager
    grad_checkpoint: bool | str
    micro_batch: int = 16
    seq_len: int = 2048
    chunk_size: int = 64
    accumulation: int = 1
    num_stages: int = 1
    num_warps: int = 4

    @classmethod
    def parse(cls, text: str, **given: int) -> "Variant":
        """From ``dispatch:compile:checkpointing[:setting=number,...]``.

        Args:
            given: fields whose default is another.

        Raises:
            UserError: it names something unknown.
        """
        dispatch, mode, checkpointed, settings = [*text.split(":"), "", "", ""][:4]
        for value, known in (
            (dispatch, BACKENDS), (mode, ("eager", *COMPILE_MODES)), (checkpointed, RECOMPUTE),
        ):  # fmt: skip
            if value not in known:
                raise UserError(f"variant {text!r}: {value!r} is none of {', '.join(known)}.")
        found = dict(given)
        for setting in settings.split(",") if settings else ():
            name, _, number = setting.partition("=")
            if name not in SETTINGS or not number.isdecimal() or int(number) < 1:
                raise UserError(
                    f"variant {text!r}: {setting!r} is no setting; write one of "
                    f"{', '.join(SETTINGS)} = a number from 1 on."
                )
            found[SETTINGS[name]] = int(number)
        if dispatch != "triton" and found.keys() & LAUNCH_KNOBS:
            raise UserError(f"variant {text!r}: stages and warps are of 'triton' alone.")
        return cls(dispatch, mode, RECOMPUTE[checkpointed], **found)

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Variant":
        """The one that a row is of; an older row lacks fields that were not settings then."""
        return cls(**{f.name: row[f.name] for f in fields(cls) if f.name in row})

    @property
    def settings(self) -> dict[str, Any]:
        """For a row."""
        knobs = () if self.dispatch == "triton" else LAUNCH_KNOBS
        return {name: value for name, value in asdict(self).items() if name not in knobs}

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.micro_batch * self.seq_len * self.accumulation

    @property
    def kernel(self) -> tuple[str, int, int, int]:
        """All that decides what computes the SSD."""
        return self.dispatch, self.chunk_size, self.num_stages, self.num_warps

    def config(self) -> TrainingConfig:
        """The production model, trained like this."""
        return TrainingConfig(
            model_config={"ssd_dispatch": self.dispatch, "chunk_size": self.chunk_size},
            grad_checkpoint=self.grad_checkpoint, batch_size=self.micro_batch,
            max_seq_len=self.seq_len, gradient_accumulation_steps=self.accumulation,
            compile_model=self.compile != "eager",
            compile_mode="default" if self.compile == "eager" else self.compile,
        )  # fmt: skip

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Where the seeds' kernel is launched as this variant says."""
        before = {name: os.environ.get(name) for name in LAUNCH_KNOBS.values()}
        os.environ.update({name: str(getattr(self, f)) for f, name in LAUNCH_KNOBS.items()})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class AccumulatingLoop(StepLoop):
    """A `StepLoop` whose optimizer step takes all the micro-steps of its configuration."""

    def __init__(self, config: TrainingConfig, device: torch.device):
        with device:  # drawing 434 M weights on the host takes longer than many a variant
            super().__init__(config, device)
        self.config = config

    def opt_step(self) -> torch.Tensor:
        for _ in range(self.config.gradient_accumulation_steps):
            loss = super().opt_step()
        return loss


def parity_or_exit(
    dispatch: str, device: torch.device, chunk_size: int = 64
) -> dict[str, dict[str, float]]:
    """Errors of the path against the oracle; a number from a wrong path is worth nothing."""
    try:
        return bench_cases.parity_errors(dispatch, device, chunk_size)
    except UserError as problem:
        sys.exit(str(problem))


@functools.cache
def gate(kernel: tuple[str, int, int, int], device: torch.device) -> dict[str, dict[str, float]]:
    """The same, once for a `Variant.kernel`, where the environment launches it so."""
    dispatch, chunk_size, *_ = kernel
    return parity_or_exit(dispatch, device, chunk_size)


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


def release() -> None:
    """Forgets the variant before: its memory, and its graphs, of which a function may have few."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def path_taken_or_exit(loop: StepLoop, dispatch: str) -> None:
    """A variant that fell back to another path would be recorded under a wrong name."""
    taken = {block._backend(loop.window.device).name for block in loop.model.layers}
    if taken != {dispatch}:
        sys.exit(f"asked for {dispatch!r}, but {sorted(taken)} ran: no row")


def cache_hits() -> int:
    """Compiled graphs that came from the cache of an earlier compilation."""
    counters = torch._dynamo.utils.counters
    graphs, joint = counters["inductor"], counters["aot_autograd"]
    return graphs["fxgraph_cache_hit"] + joint["autograd_cache_hit"]


def timed(variant: Variant, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What was measured, for a row."""
    release()
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.utils.counters.clear()
    loop = AccumulatingLoop(variant.config(), device)
    start = time.perf_counter()
    first_loss = float(loop.opt_step())
    first_step_sec = time.perf_counter() - start
    hits = cache_hits()
    path_taken_or_exit(loop, variant.dispatch)
    milliseconds(loop, args.warm_up)
    times, last_loss = milliseconds(loop, args.opt_steps)
    times.sort()
    median = times[len(times) // 2]
    tps = 1e3 * variant.tokens / median
    peak = hardware.peak_bf16_flops(hardware.device_name(device))
    flops = model_flops_per_token(loop.config.model())
    found = {
        "median_ms": round(median, 2),
        "min_ms": round(times[0], 2),
        "max_ms": round(times[-1], 2),
        "warm_up_opt_steps": args.warm_up,
        "timed_opt_steps": len(times),
        "tokens_per_sec": round(tps),
        "mfu": round(flops * tps / peak, 4) if peak else None,
        "first_step_sec": round(first_step_sec, 2),
        "compile_cache_hits": hits,
        "peak_mem_gib": round(hardware.peak_memory_bytes(device) / 2**30, 2),
        "losses": [round(first_loss, 4), round(last_loss, 4)],
    }
    return {**found, "profile_ms": profile(loop)} if args.profile else found


def measure(variant: Variant, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One row; of another benchmark where the memory does not suffice, for it has no times."""
    with variant.environment():
        settings = {
            **variant.settings,
            "compile_in_effect": compile_mode_in_effect(variant.config(), device),
            "parity_relative_l2": gate(variant.kernel, device),
        }
        try:
            return {"benchmark": "training_step", **settings, **timed(variant, args, device)}
        except torch.OutOfMemoryError as problem:
            said = ". ".join(str(problem).split(". ")[:2])
    return {"benchmark": "training_step_out_of_memory", **settings, "said": said}


def transformer(script: str, shapes: list[str]) -> dict[str, Any]:
    """What a peer's script prints, one line a shape."""
    done = subprocess.run(
        [sys.executable, script, *shapes], check=True, capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines()
    return {"benchmark": "transformer_peer", "script": Path(script).name, "printed": lines}


def environment(commit: str | None) -> dict[str, Any]:
    """The record of every row, and which start of which machine: times of one compare best."""
    boot = BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.is_file() else None
    return {**rows.environment(commit), "boot": boot}


def variants_of(args: argparse.Namespace) -> list[Variant]:
    """All that were asked for, in order.

    Raises:
        UserError: one of them names something unknown.
    """
    texts = list(args.variant)
    if args.variants is not None:
        lines = args.variants.read_text(encoding="utf-8").splitlines()
        texts += filter(None, (line.partition("#")[0].strip() for line in lines))
    return [Variant.parse(text, micro_batch=args.batch, seq_len=args.length) for text in texts]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--variant", action="append", default=[])
    ap.add_argument("--variants", type=Path, metavar="FILE", help="more of them, one a line")
    ap.add_argument("--batch", type=int, default=16, help="of variants that do not say")
    ap.add_argument("--length", type=int, default=2048, help="of variants that do not say")
    ap.add_argument("--opt-steps", type=int, default=10)
    ap.add_argument("--warm-up", type=int, default=3, help="optimizer steps after the first one")
    ap.add_argument(
        "--max-time", type=float, default=float("inf"), metavar="SECONDS",
        help="after so many no further variant begins",
    )  # fmt: skip
    ap.add_argument("--profile", action="store_true", help="where a step's time goes")
    ap.add_argument("--transformer", metavar="FILE", help="a peer's script, run first")
    ap.add_argument("--shape", action="append", default=[], help="MICRO_BATCH:SEQ_LEN for the peer")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path, required=True)
    return ap.parse_args(argv)


def main() -> None:
    start = time.perf_counter()
    args = arguments()
    try:
        variants = variants_of(args)
    except UserError as problem:
        sys.exit(str(problem))
    if not torch.cuda.is_available():
        sys.exit("training_step needs a CUDA device")
    facts = environment(args.commit)
    if args.transformer:
        rows.append(args.out, transformer(args.transformer, args.shape), facts)
    for done, variant in enumerate(variants):
        if time.perf_counter() - start >= args.max_time:
            print(f"out of time: {len(variants) - done} variants left", file=sys.stderr)
            break
        try:
            row = measure(variant, args, DEVICE)
        except UserError as problem:
            sys.exit(str(problem))
        rows.append(args.out, row, facts, hide=("parity_relative_l2",))


if __name__ == "__main__":
    main()
