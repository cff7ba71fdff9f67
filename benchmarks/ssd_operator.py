"""Times the SSD operator of one layer on a GPU against its floor, one row a path and shape.

    python benchmarks/ssd_operator.py --peer official_ssd.py --peer-path mamba_source \\
        --out benchmarks/results/ssd_operator.jsonl

Nothing is timed before every path has passed parity on this device. The operator has 16 heads of
64 channels and 64 complex states; the fused path reads a bfloat16 projection in place, the others
get float32 tensors of their own. A shape is BATCH:LENGTH.

Forward runs without gradients, forward + backward takes every gradient. eager_ms waits for the host
between calls, as the peers' script does; graph_ms replays a CUDA graph and is the device alone
(fused only: the others take milliseconds, and the host is hidden behind them). The calls take turns
on input sets that together exceed the L2 cache three times. GB/s and TFLOP/s are those of the
floor, over the time: each input read once and each output written once, the FLOPs of full tiles.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows
from training_step import parity_or_exit

from mamba3_lite import hardware
from mamba3_lite.measure.bench_cases import Operator
from mamba3_lite.models import ssd_backends, ssd_fused, ssd_plans
from mamba3_lite.models.arithmetic import ssd_flops_per_token
from mamba3_lite.models.transformer import ModelConfig

HEADS, CHANNELS, STATE = 16, 64, 64
PRODUCTION = (16, 2048)
SHAPES = (
    PRODUCTION, (8, 4096), (4, 8192), (2, 16384), (1, 32768), (1, 131072), (1, 524288),
    (1, 1048576), (1, 2048), (2, 2048), (4, 2048), (8, 2048), (32, 2048), (64, 2048),
)  # fmt: skip
# The plain paths walk the chunks from the host, one after the other.
LONGEST_PLAIN, MOST_PLAIN_TOKENS = 8192, 32768
CHUNK_PLAIN = 64
# Device memory as stated in the data sheets, in bytes per second.
STATED_BANDWIDTH = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
}
WARM_UP = 5
PEER_LINE = re.compile(
    r"^(?P<name>\S.*?)\s+forward\s+(?P<forward>[\d.]+) ms\s+forward\+backward\s+(?P<both>[\d.]+) ms"
)
# Heads that share B and C are less work; such a line is kept, and compared with nothing.
LESS_WORK = re.compile(r"groups=1$")

Call = Callable[..., Any]


@dataclass(frozen=True)
class Case(Operator):
    """One path at one shape."""

    heads: int = HEADS
    head_dim: int = CHANNELS
    state_dim: int = STATE
    chunk_size: int = CHUNK_PLAIN

    @property
    def chunk(self) -> int:
        return ssd_plans.chunk_size(self.dtype) if self.path == "fused" else self.chunk_size

    @property
    def too_slow(self) -> bool:
        """Whether a plain path would take seconds, or more memory than there is."""
        return self.path != "fused" and (
            self.length > LONGEST_PLAIN or self.batch * self.length > MOST_PLAIN_TOKENS
        )

    def floor_bytes(self) -> tuple[int, int]:
        """(forward, forward + backward); the backward pass reads the inputs again, and dy."""
        inputs, output = CHANNELS + 4 * STATE + 1, CHANNELS
        element = self.batch * self.length * HEADS * self.dtype.itemsize
        return element * (inputs + output), element * (3 * inputs + 2 * output)

    def flops(self) -> tuple[int, int]:
        """(forward, forward + backward), nothing computed twice."""
        layer = ModelConfig(
            n_layers=1, n_heads=HEADS, head_dim=CHANNELS, state_dim=STATE, chunk_size=self.chunk
        )
        forward, backward = ssd_flops_per_token(layer)
        tokens = self.batch * self.length
        return tokens * forward, tokens * (forward + backward)


def eager_ms(call: Call, sets: list, rounds: int) -> list[float]:
    """Milliseconds of each call between two events, the device idle before it; sorted."""
    found = []
    for i in range(WARM_UP + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call(*sets[i % len(sets)])
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found[WARM_UP:])


def graph_ms(call: Call, sets: list, rounds: int) -> list[float]:
    """Milliseconds of a call inside a CUDA graph of one call a set, by replay; sorted."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as captures need it: libraries and autograd warm on a stream
        for given in sets:
            call(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in sets:
            call(*given)
    for _ in range(WARM_UP):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return sorted(start.elapsed_time(end) / len(sets) for start, end in pairs)


def peak_gib(call: Call, leaves: list[Tensor], dy: Tensor, inputs: list[Tensor]) -> float:
    """Most memory during one call, its own inputs included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(leaves, dy)
    torch.cuda.synchronize()
    own = sum(tensor.nbytes for tensor in inputs)
    return round((torch.cuda.max_memory_allocated() - before + own) / 2**30, 3)


def kernels_ms(call: Call, sets: list, rounds: int) -> dict[str, float]:
    """Milliseconds of each kernel in one call, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for i in range(rounds):
            call(*sets[i % len(sets)])
        torch.cuda.synchronize()
    names: dict[str, float] = {}
    for event in record.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took = event.time_range.elapsed_us() / 1e3 / rounds
            names[event.name[:80]] = names.get(event.name[:80], 0.0) + took
    return {name: round(took, 4) for name, took in sorted(names.items(), key=lambda i: -i[1])}


def spread(times: list[float]) -> dict[str, float]:
    """Of sorted milliseconds."""
    found = {"median": times[len(times) // 2], "min": times[0], "max": times[-1]}
    return {name: round(value, 4) for name, value in found.items()}


def achieved(
    times: dict[str, dict[str, float]], n_bytes: int, n_flops: int, device: str
) -> dict[str, Any]:
    """A pass's times with its rates and its floor (absent for an unlisted device).

    The rates are those of the device alone where that was measured.
    """
    seconds = (times.get("graph_ms") or times["eager_ms"])["median"] / 1e3
    shown: dict[str, Any] = {
        **times,
        "gb_per_sec": round(n_bytes / seconds / 1e9, 1),
        "tflop_per_sec": round(n_flops / seconds / 1e12, 2),
    }
    bandwidth, peak = STATED_BANDWIDTH.get(device), hardware.peak_bf16_flops(device)
    if bandwidth is not None and peak is not None:
        floor = max(n_bytes / bandwidth, n_flops / peak)
        shown |= {"floor_ms": round(1e3 * floor, 4), "times_floor": round(seconds / floor, 2)}
    return shown


def measure(case: Case, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One row. A pass that does not fit the memory is None."""
    torch.cuda.empty_cache()
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    n_sets = max(2, -(-3 * l2 // case.floor_bytes()[0]))
    sets = [case.draw(device, seed) for seed in range(n_sets)]
    row: dict[str, Any] = {
        "benchmark": "ssd_operator",
        "path": case.path,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch,
        "seq_len": case.length,
        "heads": HEADS,
        "head_dim": CHANNELS,
        "state_dim": STATE,
        "chunk": case.chunk,
        "calls": args.rounds,
        "input_sets": n_sets,
    }
    if case.path == "fused":
        row["plan"] = ssd_fused.plan_for(device, case.dtype, HEADS, STATE, CHANNELS)
    calls: tuple[Call, Call] = (case.forward, case.both)
    for index, (name, call) in enumerate(zip(("forward", "forward_backward"), calls, strict=True)):
        try:
            # The first call: tests and chooses the plan, compiles.
            result = call(*sets[0])
            if not all(bool(torch.isfinite(t).all()) for t in (result if index else [result])):
                sys.exit(f"{case}: {name} is not finite: nothing is printed")
            del result
            leaves, dy = sets[0]
            peak = peak_gib(call, leaves, dy, [*leaves, dy] if index else leaves)
            times = {"eager_ms": spread(eager_ms(call, sets, args.rounds))}
            if case.path == "fused":
                times["graph_ms"] = spread(graph_ms(call, sets, args.rounds))
        except torch.cuda.OutOfMemoryError:
            row[name] = None
            continue
        work = case.floor_bytes()[index], case.flops()[index]
        row[name] = achieved(times, *work, hardware.device_name(device)) | {"peak_mem_gib": peak}
    if args.kernels and row["forward_backward"]:
        row["kernels_ms"] = kernels_ms(case.both, sets, args.rounds)
    return row


def copy_gb_per_sec(device: torch.device) -> float:
    """What a copy of 2 GiB reaches, reading and writing: the bandwidth that can be had."""
    source, target = (torch.empty(2**30, dtype=torch.int16, device=device) for _ in range(2))
    times = eager_ms(target.copy_, [[source]], 10)
    return round(2 * source.nbytes / times[len(times) // 2] / 1e6, 1)


def run_peer(script: str, path: str | None) -> dict[str, Any]:
    """What another script prints, its lines with times taken apart."""
    folders = [path, os.environ.get("PYTHONPATH")]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(f for f in folders if f)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=settings)
    if done.returncode != 0:
        sys.exit(f"{script} failed:\n{done.stderr[-2000:]}")
    lines = done.stdout.strip().splitlines()
    found = [match for line in lines if (match := PEER_LINE.match(line))]
    if not found:
        sys.exit(f"{script} printed no times ('NAME forward 1.0 ms forward+backward 2.0 ms')")
    times = {
        m["name"]: {"forward": float(m["forward"]), "forward_backward": float(m["both"])}
        for m in found
    }
    return {"script": Path(script).name, "printed": lines, "times_ms": times}


def versus_better_peer(row: dict[str, Any], times: dict[str, dict[str, float]]) -> dict[str, Any]:
    """How many times faster than the fastest peer that does the same work, for each pass."""
    equal = {name: peer for name, peer in times.items() if not LESS_WORK.search(name)}
    found = {}
    for name in ("forward", "forward_backward"):
        best = min(equal, key=lambda peer: equal[peer][name])
        ratios = {
            kind.removesuffix("_ms"): round(equal[best][name] / row[name][kind]["median"], 2)
            for kind in ("eager_ms", "graph_ms")
            if kind in row[name]
        }
        found[name] = {"peer": best, "peer_ms": equal[best][name], "times_faster": ratios}
    return found


def shape(text: str) -> tuple[int, int]:
    """BATCH:LENGTH."""
    batch, length = map(int, text.split(":"))
    if min(batch, length) < 1:
        raise ValueError(text)
    return batch, length


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--path", nargs="+", default=["fused"], choices=list(ssd_backends.BACKENDS))
    ap.add_argument("--shape", nargs="+", type=shape, default=list(SHAPES), help="BATCH:LENGTH")
    ap.add_argument("--rounds", type=int, default=20, help="timed calls after the warm-up")
    ap.add_argument("--kernels", action="store_true", help="milliseconds of each kernel")
    ap.add_argument("--peer", metavar="FILE", help="a script that prints its times, run first")
    ap.add_argument("--peer-path", metavar="FOLDER", help="joins the peer's PYTHONPATH")
    ap.add_argument("--commit", help="when the machine has no git checkout")
    ap.add_argument("--out", type=Path, required=True)
    return ap.parse_args(argv)


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("ssd_operator needs a CUDA device")
    device = torch.device("cuda")
    errors = {path: parity_or_exit(path, device) for path in args.path}
    peers = run_peer(args.peer, args.peer_path) if args.peer else None
    facts = rows.environment(args.commit)
    copy = copy_gb_per_sec(device)
    for case in (Case(path, *shape) for path in args.path for shape in args.shape):
        if case.too_slow:
            print(f"left out, a plain path at this size: {case}", file=sys.stderr)
            continue
        row = measure(case, args, device)
        row |= {"copy_gb_per_sec": copy, "parity_relative_l2": errors[case.path]}
        if peers is not None and (case.batch, case.length) == PRODUCTION:
            row["peers"] = peers
            row["versus_better_peer"] = versus_better_peer(row, peers["times_ms"])
        rows.append(args.out, row, facts, hide=("parity_relative_l2",))


if __name__ == "__main__":
    main()
