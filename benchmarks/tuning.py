"""Writes the tables of the Tuning Guide from the recorded rows, and draws its curves.

    python benchmarks/tuning.py --page docs/guides/tuning.md

What stands between the markers of the page is written anew; nothing else is touched. Which rows
there have to be, and how they are made, is for tuning_plan.py and tuning_curves.py; comparisons are
made by `mamba3-lite ab`, with the commands that the page has.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import plots
import rows
from training_step import Variant
from tuning_plan import ROTATED, STEPS, TABLES, Entry, Prediction

from mamba3_lite.measure import ab, ab_page
from mamba3_lite.measure.ab_arms import Protocol
from mamba3_lite.measure.stats import Estimate, standard_error
from mamba3_lite.models.transformer import ModelConfig

CURVES = STEPS.with_name("tuning_curves.jsonl")
PICTURE = "tuning_curves.png"
NOT_YET = "Not measured yet."
EXPECTED = ("the seed guide expects", "measured", "held")
SAME_LOSS = "the loss of 128 is that of 64 within noise"
LAYERS = ModelConfig().n_layers
TAIL_OPT_STEPS = 200  # of a curve, for its loss
# Commits whose rows the code of today would not repeat, and why.
OUTDATED = {
    "ab23b08": "older than the bf16 residual stream, and than float32 products in the backward "
    "pass of compiled `rotated` blocks",
}  # fmt: skip

Row = dict[str, Any]

# Tables of steps ----------------------------------------------------------------------------------


def machine(row: Row) -> str:
    """One start of one machine with one set of versions and one commit: what compares."""
    facts = {name: fact for name, fact in row["environment"].items() if name != "command"}
    return json.dumps(facts, sort_keys=True)


def _preference(rows_there: dict[str, Row]) -> tuple[bool, int]:
    """Machines with what still holds first, and of those the ones with the most."""
    commits = {row["environment"]["git"]["commit"][:7] for row in rows_there.values()}
    return bool(commits & OUTDATED.keys()), -len(rows_there)


def chosen(variants: Iterable[str], found: Sequence[Row]) -> dict[str, Row]:
    """The row of each variant that has one; of one machine as far as there is one with them."""
    wanted = {Variant.parse(text): text for text in variants}
    by_machine: dict[str, dict[str, Row]] = {}
    for row in found:
        if row["benchmark"].startswith("training_step") and (variant := Variant.of(row)) in wanted:
            # Taken out and put back: the machine seen last shall stand last.
            rows_there = by_machine.pop(machine(row), {})
            by_machine[machine(row)] = {**rows_there, wanted[variant]: row}
    ranked = sorted(reversed(by_machine.values()), key=_preference)
    picked: dict[str, Row] = {}
    for rows_there in ranked:
        picked = {**rows_there, **picked}
    return picked


def timed(row: Row | None) -> bool:
    return row is not None and "median_ms" in row


def comparable(picked: dict[str, Row], variant: str, against: str | None) -> bool:
    """Both were timed, on one machine."""
    if against is None or not (timed(picked.get(variant)) and timed(picked.get(against))):
        return False
    return machine(picked[variant]) == machine(picked[against])


def more_tokens_percent(row: Row, against: Row) -> float:
    return 100 * (row["tokens_per_sec"] / against["tokens_per_sec"] - 1)


def cells(entry: Entry, picked: dict[str, Row]) -> list[str]:
    """What a line says, from its row."""
    row = picked.get(entry.variant)
    if row is None:
        return [entry.label, "not measured yet", "", "", "", "", ""]
    commit = row["environment"]["git"]["commit"][:7]
    if not timed(row):
        return [entry.label, "out of memory", "", "", "", "", commit]
    ratio = ""
    if entry.against is not None and timed(picked.get(entry.against)):
        ratio = "another run"
        if comparable(picked, entry.variant, entry.against):
            ratio = f"{more_tokens_percent(row, picked[entry.against]):+.1f} %"
    first = f"{row['first_step_sec']:.1f}"
    if row["compile"] != "eager":
        hits = row.get("compile_cache_hits")
        first += {None: " (cache unknown)", 0: ""}.get(hits, " (cache warm)")
    return [
        entry.label,
        "{median_ms:,.0f} ({min_ms:,.0f} to {max_ms:,.0f})".format(**row),
        f"{row['tokens_per_sec']:,}",
        ratio,
        f"{row['peak_mem_gib']:.1f}",
        first,
        commit,
    ]


def verdict(prediction: Prediction, picked: dict[str, Row]) -> list[str]:
    """What was measured, and whether the prediction held."""
    row, against = picked[prediction.variant], picked[prediction.against]
    if prediction.memory:
        value = (row["peak_mem_gib"] - against["peak_mem_gib"]) / LAYERS
        shown, inside = f"{value:+.2f} GiB a layer", False
    else:
        value = more_tokens_percent(row, against)
        inside = against["min_ms"] <= row["median_ms"] <= against["max_ms"]
        shown = f"{value:+.1f} %" + (", inside the spread" if inside else "")
    if inside and prediction.high == math.inf:
        held = "not shown"
    elif value < prediction.low:
        held = "no, less"
    else:
        held = "yes" if value <= prediction.high else "no, more"
    return [prediction.says, shown, held]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in body)


def joined(values: Iterable[Any]) -> str:
    """Each value once."""
    return " and ".join(dict.fromkeys(str(value) for value in values))


def machine_words(found: Sequence[Row]) -> str:
    records = [row["environment"] for row in found]
    gpus = joined(record["gpus"][0]["name"] if record["gpus"] else "no GPU" for record in records)
    versions = [f"torch {record['torch']}, triton {record['triton']}" for record in records]
    return f"One {gpus}, {joined(versions)}"


def step_block(name: str, found: Sequence[Row]) -> str:
    """The table of a name, and the predictions that it decides."""
    table = TABLES[name]
    picked = chosen([entry.variant for entry in table.entries], found)
    if not picked:
        return NOT_YET
    head = [table.column, "ms an optimizer step", "tok/s", table.against, "peak GiB",
            "first step, s", "commit"]  # fmt: skip
    parts = [markdown(head, [cells(entry, picked) for entry in table.entries])]
    took = [row for row in picked.values() if timed(row)]
    if took:
        counts = joined(row["timed_opt_steps"] for row in took)
        parts.append(f"{machine_words(took)}; medians (minimum to maximum) of {counts} steps.")
        commits = {row["environment"]["git"]["commit"][:7] for row in took}
        parts += [f"Rows of {c} are {why}." for c, why in OUTDATED.items() if c in commits]
    decided = [
        verdict(prediction, picked)
        for prediction in table.predictions
        if comparable(picked, prediction.variant, prediction.against)
    ]
    if decided:
        parts.append(markdown(EXPECTED, decided))
    return "\n\n".join(parts)


# Tables of curves ---------------------------------------------------------------------------------


class CurveTable(NamedTuple):
    """Its first column, the lines (label, run), and the run that they are compared with."""

    column: str
    lines: Sequence[tuple[str, str]]
    reference: str = "base"


CURVE_TABLES: dict[str, CurveTable] = {
    "lr": CurveTable("lr", [
        ("1.5e-4", "lr 1.5e-4"), ("3e-4", "base"), ("6e-4", "lr 6e-4"), ("1.2e-3", "lr 1.2e-3"),
        ("1e-2", "lr 1e-2"),
    ]),
    "warmup": CurveTable("warmup_steps", [
        ("0", "warm-up 0"), ("100", "base"), ("500", "warm-up 500"),
    ]),
    "floor": CurveTable("min_lr_ratio", [("0", "floor 0"), ("0.05", "base"), ("0.5", "floor 0.5")]),
    "chunk_loss": CurveTable("chunk_size", [("64", "chunk 64"), ("128", "chunk 128")], "chunk 64"),
    "noise": CurveTable("path and seed", [
        ("`fused`, bf16, seed 0", "base"), ("`rotated`, float32, seed 0", "chunk 64"),
        ("`fused`, bf16, seed 1", "seed 1"),
    ]),
}  # fmt: skip


def failed(row: Row) -> bool:
    return row["ended"].startswith("failed")


def tail(row: Row, last: int) -> dict[int, float]:
    """The losses that count, by optimizer step."""
    return {s: loss for s, loss in row["curve"] if last - TAIL_OPT_STEPS < s <= last}


def difference(row: Row, reference: Row, last: int) -> tuple[float, float]:
    """Mean and standard error of the paired differences of the losses that count, in nat."""
    own, other = tail(row, last), tail(reference, last)
    pairs = np.array([own[s] - other[s] for s in sorted(own.keys() & other.keys())])
    return float(pairs.mean()), standard_error(pairs)


def curve_cells(label: str, row: Row | None, reference: Row, last: int) -> list[str]:
    """What a line says, from its row."""
    if row is None:
        return [label, "not measured yet", "", "", "", "", ""]
    windows = f"{row['dropped_windows']} dropped, {row['events'].get('spike', 0)} spikes"
    how = "failed at" if failed(row) else "until"
    ended = row["ended"] if row["ended"] == "finished" else f"{how} {row['last_opt_step']:,}"
    if failed(row) or len(tail(row, last)) < 2:
        return [label, "", "", "", "", windows, ended]
    against = validated = val_against = ""
    if row["val_loss"] is not None:
        validated = f"{row['val_loss']:.3f}"
    if row is not reference:
        against = "{:+.3f} ± {:.3f}".format(*difference(row, reference, last))
        if validated and reference["val_loss"] is not None:
            val_against = f"{row['val_loss'] - reference['val_loss']:+.3f}"
    mean = f"{np.mean(list(tail(row, last).values())):.3f}"
    return [label, mean, against, validated, val_against, windows, ended]


def higher(row: Row, reference: Row, last: int) -> tuple[str, str]:
    """Whether a loss is higher than the reference's, beyond two standard errors."""
    mean, error = difference(row, reference, last)
    held = "not shown" if abs(mean) <= 2 * error else ("yes" if mean > 0 else "no, lower")
    return f"{mean:+.3f} ± {error:.3f} nat", held


def curve_verdicts(name: str, runs: dict[str, Row], last: int) -> list[list[str]]:
    """What the seed guide expects, where its runs are there."""
    if name == "lr" and "lr 1e-2" in runs:
        dropped = runs["lr 1e-2"]["dropped_windows"]
        says = "a rate far too high (1e-2) shows as `[nan-guard]` lines"
        return [[says, f"{dropped} windows dropped", "yes" if dropped else "no"]]
    if name == "warmup" and {"warm-up 0", "base"} <= runs.keys() and not failed(runs["warm-up 0"]):
        measured = higher(runs["warm-up 0"], runs["base"], last)
        return [["without warm-up the loss is higher than with it", *measured]]
    if name == "chunk_loss" and {"chunk 64", "chunk 128", "base", "seed 1"} <= runs.keys():
        mean, error = difference(runs["chunk 128"], runs["chunk 64"], last)
        seeds, _ = difference(runs["seed 1"], runs["base"], last)
        same = abs(mean) <= max(2 * error, abs(seeds))
        measured = f"{mean:+.3f} ± {error:.3f} nat; two seeds differ by {abs(seeds):.3f}"
        return [[SAME_LOSS, measured, "yes" if same else "no"]]
    return []


def curve_block(name: str, found: Sequence[Row]) -> str:
    """The table of a name: losses beside those of the reference."""
    table = CURVE_TABLES[name]
    runs = {row["name"]: row for row in found if row["benchmark"] == "tuning_curve"}
    reference = runs.get(table.reference)
    if reference is None or failed(reference):
        return NOT_YET
    there = [runs[run] for _, run in table.lines if run in runs]
    last = min(row["last_opt_step"] for row in there if not failed(row))
    head = [
        table.column, f"training loss to {last:,}", "difference", "validation loss", "difference",
        "windows", "run",
    ]  # fmt: skip
    lines = [curve_cells(label, runs.get(run), reference, last) for label, run in table.lines]
    commits = joined(row["environment"]["git"]["commit"][:7] for row in there)
    parts = [
        markdown(head, lines),
        f"{machine_words(there)}, commit {commits}; {reference['parameters'] / 1e6:.1f} M "
        f"parameters, {reference['opt_steps']:,} optimizer steps of "
        f"{reference['tokens_per_opt_step']:,} tokens. Losses in nat, in training over the last "
        f"{TAIL_OPT_STEPS} optimizer steps up to {last:,}; ± is one standard error.",
    ]
    if decided := curve_verdicts(name, runs, last):
        parts.append(markdown(EXPECTED, decided))
    if name == "lr":
        parts.append(f"![Training loss by rate, warm-up, floor, path and seed]({PICTURE})")
    return "\n\n".join(parts)


# Tables of comparisons by `mamba3-lite ab` --------------------------------------------------------

# Of chunk_size 64 against 128: the speed at the production shape, and the loss of a small model.
AB_TABLES = {
    "ab_speed": STEPS.with_name("ab_chunk_size_h200.jsonl"),
    "ab_loss": STEPS.with_name("ab_chunk_size_16m_h200.jsonl"),
}
LOSS_HELD = {"passed": "yes", "undecided": "not shown", "failed": "no"}


def interval_verdict(prediction: Prediction, found: Estimate) -> list[str]:
    """What was measured with its interval, and whether all of that is as predicted."""
    style, unit = "+.1f", " %"
    if prediction.memory:
        style, unit = "+.2f", " GiB a layer"
        found = Estimate(*(end / LAYERS for end in (found.mean, found.low, found.high)))
    if found.high < prediction.low:
        held = "no, less"
    elif found.low > prediction.high:
        held = "no, more"
    else:
        inside = prediction.low <= found.low and found.high <= prediction.high
        held = "yes" if inside else "not shown"
    shown = f"{found.mean:{style}}{unit} [{found.low:{style}}, {found.high:{style}}]"
    return [prediction.says, shown, held]


def ab_block(found: Sequence[Row]) -> str:
    """The table of a comparison as `ab` shows it, its verdict, and the predictions it decides.

    With timed micro-steps only these are the ones on speed and memory, else the one on the loss.
    """
    if not found:
        return NOT_YET
    experiment, runs = found[0], [row for row in found if row["kind"] == "run"]
    protocol = Protocol(**experiment["protocol"])
    comparisons, sentences = ab.conclude(experiment, runs, protocol)
    head, lines = ab_page.table(experiment, runs, comparisons)
    (one,) = comparisons
    if protocol.throughput:
        estimates = {False: one.speed_percent, True: one.peak_mem_gib}
        decided = [
            interval_verdict(prediction, estimates[prediction.memory])
            for prediction in TABLES["chunk_size"].predictions
            if prediction.variant == f"{ROTATED}:chunk=128"
        ]
    else:
        loss = one.loss_nat
        shown = f"{loss.mean:+.4f} nat [{loss.low:+.4f}, {loss.high:+.4f}]"
        decided = [[SAME_LOSS, shown, LOSS_HELD[one.loss_check]]]
    return "\n\n".join([
        markdown(head, lines),
        f"{machine_words([experiment])}, code {experiment['environment']['code']}; "
        f"{one.repeats} repeats of {protocol.opt_steps:,} optimizer steps, of which the first "
        f"{protocol.drop_opt_steps:,} do not count for speed; intervals at 95 %.",
        *(f"Verdict: {sentence}." for sentence in sentences),
        markdown(EXPECTED, decided),
    ])  # fmt: skip


# The page -----------------------------------------------------------------------------------------

BLOCK = re.compile(r"(<!-- rows: (\w+) -->\n)(?:(?!<!-- ).)*(<!-- end of rows -->)", re.DOTALL)


def recorded(path: Path) -> list[Row]:
    return rows.read(path) if path.is_file() else []


def render(
    page: str,
    steps: Sequence[Row],
    curves: Sequence[Row],
    comparisons: Mapping[str, Sequence[Row]],
) -> str:
    """The page with every table between its markers written anew from the rows."""

    def block(found: re.Match[str]) -> str:
        name = found[2]
        if name in TABLES:
            return f"{found[1]}\n{step_block(name, steps)}\n\n{found[3]}"
        if name in CURVE_TABLES:
            return f"{found[1]}\n{curve_block(name, curves)}\n\n{found[3]}"
        if name in AB_TABLES:
            return f"{found[1]}\n{ab_block(comparisons[name])}\n\n{found[3]}"
        known = ", ".join([*TABLES, *CURVE_TABLES, *AB_TABLES])
        sys.exit(f"no table is called {name!r}; known: {known}")

    return BLOCK.sub(block, page)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--page", type=Path, required=True)
    args = ap.parse_args()
    curves = recorded(CURVES)
    page = args.page.read_text(encoding="utf-8")
    comparisons = {name: recorded(path) for name, path in AB_TABLES.items()}
    args.page.write_text(render(page, recorded(STEPS), curves, comparisons), encoding="utf-8")
    if curves:
        plots.draw(CURVES, args.page.with_name(PICTURE))


if __name__ == "__main__":
    main()
