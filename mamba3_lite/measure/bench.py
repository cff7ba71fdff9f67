"""The command `bench`: how long things take, and whether that got better, worse, or neither."""

import functools
import math
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mamba3_lite import hardware
from mamba3_lite.errors import UserError
from mamba3_lite.measure import bench_rows
from mamba3_lite.measure.bench_cases import WHAT, Case, milliseconds, parity_errors, plan
from mamba3_lite.measure.bench_verdict import LEAST_PERCENT, Verdict, judge
from mamba3_lite.schema import find_config, nearest
from mamba3_lite.training.config import TrainingConfig, load_training_config

CONFIGS = {"cuda": "configs/pretrain_h200_434m.yaml", "cpu": "configs/quickstart.yaml"}
EXIT_WORSE = 1
WARM_UP_CALLS = 3
# A repeat takes about so long, and not fewer calls than these, so that a median is one.
REPEAT_MS = 500.0
FEWEST_CALLS, MOST_CALLS = 3, 2_000


class Timed:
    """A case that is built, warm, and knows how many calls make a repeat."""

    def __init__(self, case: Case, device: torch.device, stack: ExitStack) -> None:
        self.case = case
        held = 0
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        self.work = case.build(stack)
        self._clock = torch.device("cpu") if self.work.on_host else device
        milliseconds(self.work.call, 1, self._clock)
        self.start_sec = time.perf_counter() - start
        milliseconds(self.work.call, WARM_UP_CALLS, self._clock)
        took = statistics.median(milliseconds(self.work.call, WARM_UP_CALLS, self._clock))
        self.calls = min(max(math.ceil(REPEAT_MS / took), FEWEST_CALLS), MOST_CALLS)
        self.peak_bytes = None
        if device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - held
        self.repeats_ms: list[float] = []

    def repeat(self) -> None:
        """One more block of calls."""
        self.work.call()  # what another case has pushed out of the caches comes back
        times = milliseconds(self.work.call, self.calls, self._clock)
        self.repeats_ms.append(statistics.median(times) / self.work.units)

    def row(self) -> dict[str, Any]:
        """What was measured, ready for JSON; times are those of one unit."""
        median = statistics.median(self.repeats_ms)
        peak = self.peak_bytes
        return {
            "median_ms": round(median, 6),
            "min_ms": round(min(self.repeats_ms), 6),
            "max_ms": round(max(self.repeats_ms), 6),
            "repeats_ms": [round(ms, 6) for ms in self.repeats_ms],
            "calls_a_repeat": self.calls,
            "tokens_per_sec": round(1e3 * self.work.tokens / median, 1),
            "start_sec": round(self.start_sec, 2),
            "peak_mem_gib": None if peak is None else round(peak / 2**30, 3),
        }


def measure(cases: Sequence[Case], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """One result a case, in their order.

    Every repeat goes through all cases, so a slow minute of the machine falls on all of them, and
    shows in their spread.

    Raises:
        UserError: the device has no memory for them.
    """
    console = Console(stderr=True)
    bar = functools.partial(track, console=console, transient=True, disable=not console.is_terminal)
    with ExitStack() as stack:
        try:
            timed = [Timed(case, device, stack) for case in bar(cases, description="warm-up")]
            for _ in bar(range(repeats), description="repeats"):
                for one in timed:
                    one.repeat()
        except torch.OutOfMemoryError as problem:
            raise UserError(
                f"out of memory ({str(problem).split('. ')[0]}): measure one thing at a time, or "
                "with a smaller training.micro_batch_size."
            ) from problem
        return [one.row() for one in timed]


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What to measure (everything where nothing is named), in a fixed order; and the overrides."""
    overrides = [word for word in words if "=" in word]
    named = [word for word in words if "=" not in word]
    for word in named:
        if word not in WHAT:
            raise UserError(
                f"bench {word!r} is unknown{nearest(word, WHAT)}; there are {', '.join(WHAT)}, and "
                "overrides such as training.micro_batch_size=8."
            )
    return [one for one in WHAT if one in named or not named], overrides


def headline(
    path: str, config: TrainingConfig, device: torch.device, backend: str | None, *, chosen: bool
) -> str:
    """What is measured, in one line."""
    model = config.model()
    small = "" if chosen or device.type == "cuda" else " (small for want of a GPU; see --config)"
    ssd = "" if backend is None else f", SSD path {backend}"
    return (
        f"{path}{small}: {config.batch_size} x {config.max_seq_len:,} tokens, {model.n_layers} "
        f"layers of {model.d_model}{ssd}, on {hardware.device_name(device)}"
    )


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Times and rates."""
    shown = Table("case", "ms", "repeats from .. to", "tok/s")
    for row in rows:
        times = [f"{row[name]:,.3f}" for name in ("median_ms", "min_ms", "max_ms")]
        rate = f"{row['tokens_per_sec']:,.0f}"
        shown.add_row(row["case"], times[0], " .. ".join(times[1:]), rate)
    return shown


def compare(
    rows: Sequence[dict[str, Any]], baseline: dict[str, bench_rows.Row], least: float
) -> list[Verdict]:
    """Prints a line a case, and the sum of them; the verdicts."""
    verdicts = []
    for row in rows:
        old = baseline.get(row["case"])
        if old is None:
            print(f"{row['case']}: no row in the baseline")
            continue
        verdict = judge(old["repeats_ms"], row["repeats_ms"], cases=len(baseline), least=least)
        verdicts.append(verdict)
        changed = bench_rows.differences(old, row)
        label = f" [ACROSS {'; '.join(changed)}]" if changed else ""
        print(f"{row['case']}: {verdict.words}, against {_commit(old)} of {old['time']}{label}")
    counts = {word: sum(v.word == word for v in verdicts) for word in ("worse", "better", "noise")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return verdicts


def _commit(row: bench_rows.Row) -> str:
    git = row["environment"].get("git")
    if git is None:
        return "a commit unknown"
    return f"{git['commit'][:7]}{' (modified)' if git['dirty'] else ''}"


def bench_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT|section.key=value",
            help=f"What to time, of {', '.join(WHAT)} (all by default); and overrides.",
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML configuration; default: for one GPU, or small.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append JSON rows to this file.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Compare with the newest rows of this file.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Blocks of calls for each case.")] = 8,
    least: Annotated[
        float, typer.Option(min=0, help="Percent that a difference must be shown to exceed.")
    ] = LEAST_PERCENT,
    across: Annotated[
        bool, typer.Option("--across", help="Compare other machines, versions or settings, too.")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="To record where there is no checkout.")
    ] = None,
) -> None:
    """Time the SSD operator, optimizer steps, the loader and decoding; compare with a baseline.

    Nothing is timed before the SSD path has passed parity with the oracle on this device.

    Examples:

    mamba3-lite bench --out bench.jsonl

    mamba3-lite bench --baseline bench.jsonl

    mamba3-lite bench operator step --config run.yaml training.micro_batch_size=8

    Exit codes: 0 measured, nothing worse; 1 something is worse beyond noise; 2 user error, or
    parity failed, and nothing was measured.
    """
    what, overrides = split_words(words or [])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = config or CONFIGS[device.type]
    settings, _ = load_training_config(find_config(path), overrides)
    known = [] if baseline is None else bench_rows.read(baseline)
    cases, backend = plan(settings, device, what)
    facts = {
        **bench_rows.environment(shlex.join(["mamba3-lite", *sys.argv[1:]]), commit),
        "threads": torch.get_num_threads(),
    }
    rows: list[dict[str, Any]] = [
        {"benchmark": bench_rows.KIND, "case": case.name, "settings": case.settings,
         "config": path, "environment": facts}
        for case in cases
    ]  # fmt: skip
    olds = bench_rows.counterparts(known, rows, across=across)
    gate = None if backend is None else parity_errors(backend, device, settings.model().chunk_size)
    if out is not None:
        bench_rows.append(out, [])  # may it be written? Asked before the minutes, not after.
    print(headline(path, settings, device, backend, chosen=config is not None))
    for row, measured in zip(rows, measure(cases, device, repeats), strict=True):
        ours = gate if "backend" in row["settings"] else None
        row |= {**measured, "parity_relative_l2": ours, "time": bench_rows.now()}
    Console().print(table(rows))
    if out is not None:
        bench_rows.append(out, rows)
    if baseline is not None:
        verdicts = compare(rows, olds, least)
        raise typer.Exit(EXIT_WORSE if any(v.word == "worse" for v in verdicts) else 0)
