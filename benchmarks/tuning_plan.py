"""What the Tuning Guide needs to be measured on one GPU, the most important first.

    python benchmarks/tuning_plan.py
    python benchmarks/tuning_plan.py --commit 8fee53f --write left.txt
    python benchmarks/training_step.py --variants left.txt --opt-steps 5 --warm-up 2 \\
        --max-time 540 --commit 8fee53f --out benchmarks/results/training_step.jsonl

The first prints the plan: reckoned seconds of each variant, all seconds so far, and the memory that
`mamba3-lite plan` predicts. With --commit what has a row of that commit is left out, so that a run
that was cut short goes on where it ended. Learning curves are those of tuning_curves.py, and
tuning.py makes the tables.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows
from training_step import Variant

from mamba3_lite.measure import budget

STEPS = Path(__file__).parent / "results" / "training_step.jsonl"

FUSED, ROTATED = "fused:default:0", "rotated:default:0"
PYTORCH, TRITON = "pytorch:default:1", "triton:default:1"
# All variants, the most important first, with the seconds that each is reckoned to take on an H200
# beside START_SEC: building, the first step with its compilation, seven more steps. What compiles
# longest stands last, where a cut loses the least.
START_SEC = 45
SECONDS: dict[str, int] = {
    FUSED: 30, "fused:default:1": 10, PYTORCH: 32, ROTATED: 58, "rotated:default:1": 15,
    TRITON: 20, f"{PYTORCH}:chunk=128": 17, f"{PYTORCH}:chunk=256": 19, f"{PYTORCH}:chunk=32": 17,
    f"{TRITON}:chunk=128": 20, f"{TRITON}:chunk=256": 24, f"{TRITON}:chunk=32": 20,
    f"{ROTATED}:chunk=128": 32, f"{ROTATED}:chunk=256": 22, "fused:eager:0": 7,
    "fused:reduce-overhead:0": 14, "fused:reduce-overhead:0:batch=4,accumulate=16": 20,
    f"{FUSED}:accumulate=2": 9, f"{FUSED}:accumulate=4": 12,
    f"{FUSED}:accumulate=8": 19, f"{FUSED}:batch=4,accumulate=16": 25,
    f"{FUSED}:batch=8,accumulate=8": 23, f"{FUSED}:batch=32,accumulate=2": 23,
    "fused:default:1:batch=32,accumulate=2": 25, "fused:default:1:batch=64": 25,
    "fused:default:selective": 25, "pytorch:eager:1": 12, f"{TRITON}:stages=2": 16,
    f"{TRITON}:stages=3": 16, f"{TRITON}:warps=2": 16, f"{TRITON}:warps=8": 16,
    "rotated:default:selective": 80, "pytorch:default:selective": 32, "pytorch:default:0": 14,
    "triton:eager:1": 14, "rotated:eager:1": 16, "fused:max-autotune:0": 90,
    f"{ROTATED}:chunk=32": 110, "pytorch:max-autotune:1": 220,
}  # fmt: skip
# Twelve runs that take turns at one GPU, some 22 s of it each, the two rotated ones more.
CURVES_SEC = 420


class Entry(NamedTuple):
    """A line of a table: the variant, and the one that its speed is compared with."""

    label: str
    variant: str
    against: str | None = None


class Prediction(NamedTuple):
    """What the seed guide expects of one variant against another; ``low`` to ``high`` holds it."""

    says: str
    variant: str
    against: str
    low: float
    high: float = math.inf
    memory: bool = False  # GiB a layer that the variant takes more; else percent more tok/s


class Table(NamedTuple):
    """One block of the page: its first column, what the column of ratios is called, its lines."""

    column: str
    against: str
    entries: Sequence[Entry]
    predictions: Sequence[Prediction] = ()


def chunk_table() -> Table:
    entries, predictions = [], []
    for base in (PYTORCH, ROTATED, TRITON):
        name = f"`{base.partition(':')[0]}`"
        entries.append(Entry(f"{name}, 32", f"{base}:chunk=32", base))
        entries.append(Entry(f"{name}, 64", base))
        entries += [Entry(f"{name}, {c}", f"{base}:chunk={c}", base) for c in (128, 256)]
        for chunk, says, low, high in (
            (32, "about as fast as 64, taken as ± 2 %", -2, 2), (128, "+5 to +10 %", 5, 10),
            (256, "+10 to +15 %", 10, 15),
        ):  # fmt: skip
            variant = f"{base}:chunk={chunk}"
            predictions.append(Prediction(f"{name}, {chunk}: {says}", variant, base, low, high))
    says = "without recomputation, L of 128 takes 0.25 GiB a layer more than L of 64"
    predictions.append(Prediction(says, f"{ROTATED}:chunk=128", ROTATED, 0.2, 0.3, memory=True))
    entries.append(Entry("`fused`, any", FUSED))
    return Table("path, chunk_size", "against 64", entries, predictions)


def checkpoint_table() -> Table:
    entries, predictions = [], []
    for dispatch in ("fused", "rotated", "pytorch"):
        off, selective, on = (f"{dispatch}:default:{how}" for how in ("0", "selective", "1"))
        entries += [
            Entry(f"`{dispatch}`, true", on), Entry(f"`{dispatch}`, selective", selective, on),
            Entry(f"`{dispatch}`, false", off, on),
        ]  # fmt: skip
        faster = f"`{dispatch}`: false is 25 to 30 % faster"
        saves = f"`{dispatch}`: false takes about 1.4 GiB a layer more"
        predictions += [
            Prediction(faster, off, on, 25, 30), Prediction(saves, off, on, 1.3, 1.5, memory=True)
        ]  # fmt: skip
    return Table("path, grad_checkpoint", "against true", entries, predictions)


def compile_table() -> Table:
    entries, predictions = [], []
    for dispatch, recompute in (("fused", "0"), ("pytorch", "1")):
        none, default, tuned = (
            f"{dispatch}:{mode}:{recompute}" for mode in ("eager", "default", "max-autotune")
        )
        entries.append(Entry(f"`{dispatch}`, none", none))
        entries.append(Entry(f"`{dispatch}`, default", default, none))
        entries.append(Entry(f"`{dispatch}`, max-autotune", tuned, none))
        says = f"`{dispatch}`: max-autotune is faster than default"
        predictions.append(Prediction(says, tuned, default, 0))
    return Table("path, compile_mode", "against none", entries, predictions)


def graph_table() -> Table:
    entries, predictions = [], []
    for label, settings in (("16 × 1", ""), ("4 × 16", ":batch=4,accumulate=16")):
        default, graphs = (f"fused:{mode}:0{settings}" for mode in ("default", "reduce-overhead"))
        entries.append(Entry(f"{label}, default", default))
        entries.append(Entry(f"{label}, reduce-overhead", graphs, default))
        predictions.append(
            Prediction(f"{label}: reduce-overhead is faster than default", graphs, default, 0)
        )
    return Table("micro batch × accumulation, mode", "against default", entries, predictions)


def dispatch_table() -> Table:
    entries = [Entry("`pytorch`, default, true", PYTORCH)]
    for variant, label in (
        (TRITON, "`triton`, default, true"), ("rotated:default:1", "`rotated`, default, true"),
        ("fused:default:1", "`fused`, default, true"), (ROTATED, "`rotated`, default, false"),
        (FUSED, "`fused`, default, false"), ("pytorch:eager:1", "`pytorch`, none, true"),
        ("triton:eager:1", "`triton`, none, true"), ("rotated:eager:1", "`rotated`, none, true"),
    ):  # fmt: skip
        entries.append(Entry(label, variant, PYTORCH))
    return Table("path, compile_mode, grad_checkpoint", "against `pytorch`", entries)


def batch_table() -> Table:
    middle = f"{FUSED}:accumulate=4"
    off = {batch: f"{FUSED}:batch={batch},accumulate={64 // batch}" for batch in (4, 8, 32)}
    off[16] = middle
    entries = [
        Entry(f"{batch} × {64 // batch}, false", off[batch], None if batch == 16 else middle)
        for batch in sorted(off)
    ]
    entries += [
        Entry("32 × 2, true", "fused:default:1:batch=32,accumulate=2", middle),
        Entry("64 × 1, true", "fused:default:1:batch=64", middle),
    ]
    predictions = [
        Prediction(f"{large} is faster than {small}", off[large], off[small], 0)
        for small, large in ((4, 8), (8, 16), (16, 32))
    ]
    column = "micro batch × accumulation, grad_checkpoint"
    return Table(column, "against 16 × 4", entries, predictions)


def accumulation_table() -> Table:
    variants = {n: f"{FUSED}:accumulate={n}" for n in (2, 4, 8)}
    entries = [Entry(f"16 × {n}", variant, FUSED) for n, variant in variants.items()]
    predictions = [
        Prediction(f"16 × {n}: the same tok/s, taken as ± 1 %", variant, FUSED, -1, 1)
        for n, variant in variants.items()
    ]
    entries = [Entry("16 × 1", FUSED), *entries]
    return Table("micro batch × accumulation", "against 16 × 1", entries, predictions)


def launch_table() -> Table:
    entries = [Entry("1, 4", TRITON)]
    for label, setting in (
        ("2, 4", "stages=2"), ("3, 4", "stages=3"), ("1, 2", "warps=2"), ("1, 8", "warps=8")
    ):  # fmt: skip
        entries.append(Entry(label, f"{TRITON}:{setting}", TRITON))
    return Table("stages, warps", "against 1, 4", entries)


TABLES: dict[str, Table] = {
    "dispatch": dispatch_table(), "chunk_size": chunk_table(), "batch": batch_table(),
    "accumulation": accumulation_table(), "grad_checkpoint": checkpoint_table(),
    "compile": compile_table(), "graphs": graph_table(), "launch": launch_table(),
}  # fmt: skip


def left(found: Sequence[dict[str, Any]], commit: str | None) -> list[str]:
    """The variants without a row of this commit (None: all), the most important first."""
    done = {
        Variant.of(row)
        for row in found
        if row["benchmark"].startswith("training_step")
        and commit is not None
        and row["environment"]["git"]["commit"].startswith(commit)
    }
    return [text for text in SECONDS if Variant.parse(text) not in done]


def plan(found: Sequence[dict[str, Any]], commit: str | None) -> Iterator[str]:
    """A line for each variant that is left: its seconds, all so far, and the memory predicted."""
    total = START_SEC
    for text in left(found, commit):
        total += SECONDS[text]
        variant = Variant.parse(text)
        gib = budget.peak_bytes(variant.config(), variant.dispatch) / 2**30
        yield f"{SECONDS[text]:5d} s {total:6d} s {gib:7.1f} GiB  {text}"
    yield f"speed: {total} s; curves: about {CURVES_SEC} s with all runs at once"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--commit", help="leave out what has a row of this commit")
    ap.add_argument("--write", type=Path, metavar="FILE", help="the variants, for training_step.py")
    args = ap.parse_args()
    found = rows.read(STEPS)
    if args.write is None:
        print(*plan(found, args.commit), sep="\n")
    else:
        lines = left(found, args.commit)
        args.write.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
