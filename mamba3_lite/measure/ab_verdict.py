"""From the rows of finished runs to estimates and a verdict in words."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mamba3_lite.measure.ab_arms import Protocol
from mamba3_lite.measure.stats import Estimate, over_blocks, over_repeats

CONFIDENCE = 0.95
# A pure throughput knob that moves the loss by more than this is a mistake somewhere.
LOSS_LIMIT_NAT = 0.01
# Nobody chooses a setting for less than this share of the memory.
_LEAST_MEMORY_SHARE = 0.005
# The median of normal values is so many times less certain than their mean.
_MEDIAN_PENALTY = math.sqrt(math.pi / 2)

Run = Mapping[str, Any]  # a row of kind "run"


def summary(logged: Sequence[Mapping[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """The numbers of one run from its log rows, as they stand in ab.jsonl.

    ``tps`` is the median of the last rows after the dropped ones, ``loss`` the mean of the last
    rows up to ``loss_at``. ``failed`` is None, or why the run counts for nothing.
    """
    rows = [row for row in logged if row["kind"] == "train"]
    settled = [
        r["tps"] for r in rows if r["opt_step"] - protocol.row_opt_steps >= protocol.drop_opt_steps
    ]
    settled = settled[-protocol.last_rows :]
    reached = [r["loss"] for r in rows if r["opt_step"] <= protocol.loss_at][-protocol.last_rows :]
    dropped = rows[-1]["dropped_windows"]
    failed = None
    if dropped or None in reached:
        failed = f"{dropped} windows without a finite loss or gradient"
    return {
        "failed": failed,
        "tps": statistics.median(settled),
        "tps_rows": [round(tps, 2) for tps in settled],
        "loss": None if failed else statistics.fmean(reached),
        "loss_rows": reached,
        "peak_mem_gib": max(row["peak_mem_gib"] for row in rows),
        "curve": [[row["opt_step"], row["loss"]] for row in rows],
    }


@dataclass(frozen=True)
class Comparison:
    """One arm against the reference, each estimate as arm minus reference."""

    arm: str
    against: str
    repeats: int
    confidence: float
    speed_percent: Estimate
    loss_nat: Estimate
    peak_mem_gib: Estimate | None  # one repeat says nothing of its spread
    loss_check: str | None  # passed, undecided or failed; None: the key may change the loss
    words: str

    def row(self) -> dict[str, Any]:
        """As it stands in ab.jsonl."""
        return {"kind": "verdict", **asdict(self)}


def compare(
    reference: Sequence[Run], arm: Sequence[Run], protocol: Protocol, *, arms: int, key: str,
    pure: bool,
) -> Comparison:  # fmt: skip
    """Pairs the runs of equal repeats, which had the same seed and were neighbours in time.

    Args:
        reference, arm: runs that did not fail; at least one repeat is in both.
        arms: of the whole comparison: with more than two, all intervals hold at once (Bonferroni).
        key: in which the arms differ, for the words.
        pure: the key must not change the loss.
    """
    confidence = 1 - (1 - CONFIDENCE) / (arms - 1)
    by_repeat = {run["repeat"]: run for run in reference}
    pairs = [(by_repeat[run["repeat"]], run) for run in arm if run["repeat"] in by_repeat]
    speed, loss = _speed(pairs, confidence), _loss(pairs, confidence)
    memory = told = None
    if len(pairs) > 1:
        differences = [b["peak_mem_gib"] - a["peak_mem_gib"] for a, b in pairs]
        memory = over_repeats(differences, confidence=confidence)
        if abs(memory.mean) >= _LEAST_MEMORY_SHARE * pairs[0][0]["peak_mem_gib"]:
            told = memory if memory.differs else None
    checked = _check(loss) if pure else None
    name = arm[0]["arm"]
    words = _words(name, protocol.loss_name, key, speed, loss, told, checked)
    if len(pairs) == 1:
        words += " (one repeat: the noise between runs is not in the intervals)"
    return Comparison(
        name, reference[0]["arm"], len(pairs), confidence, speed, loss, memory, checked, words
    )


def _speed(pairs: Sequence[tuple[Run, Run]], confidence: float) -> Estimate:
    """Percent that the second of each pair is faster than the first."""
    ratios = [math.log(b["tps"] / a["tps"]) for a, b in pairs]
    if len(pairs) > 1:
        found = over_repeats(ratios, confidence=confidence)
        ends = (found.mean, found.low, found.high)
    else:
        ((a, b),) = pairs
        rows = np.log(_same_length(a["tps_rows"], b["tps_rows"]))
        margin = _MEDIAN_PENALTY * over_blocks(rows[1] - rows[0], confidence=confidence).margin
        ends = (ratios[0], ratios[0] - margin, ratios[0] + margin)
    return Estimate(*(100 * math.expm1(end) for end in ends))


def _loss(pairs: Sequence[tuple[Run, Run]], confidence: float) -> Estimate:
    """Nat that the second of each pair is higher than the first, on the same data."""
    if len(pairs) > 1:
        return over_repeats([b["loss"] - a["loss"] for a, b in pairs], confidence=confidence)
    ((a, b),) = pairs
    rows = _same_length(a["loss_rows"], b["loss_rows"])
    return over_blocks(rows[1] - rows[0], confidence=confidence)


def _same_length(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    length = min(len(a), len(b))
    return np.array([a[-length:], b[-length:]])


def _check(loss: Estimate) -> str:
    if abs(loss.mean) <= LOSS_LIMIT_NAT:
        return "passed"
    return "failed" if loss.differs else "undecided"


def _words(
    name: str, loss_name: str, key: str, speed: Estimate, loss: Estimate, memory: Estimate | None,
    checked: str | None,
) -> str:  # fmt: skip
    """One sentence; ``memory`` is None where there is nothing to tell of it."""
    moved = loss.differs if checked is None else checked != "passed"
    if not (speed.differs or moved or memory):
        return (
            f"{name}: no difference shown (speed {speed.mean:+z.1f} % {_ends(speed, 1)}, "
            f"{loss_name} {loss.mean:+z.4f} nat {_ends(loss, 4)})"
        )
    parts = [f"{name}: no difference in speed shown ({speed.mean:+z.1f} % {_ends(speed, 1)})"]
    if speed.differs:
        parts = [f"{name} is {_more(speed, 1, ' %', 'faster', 'slower')}"]
    if memory is not None:
        parts.append(f"peak memory {_more(memory, 2, ' GiB', 'more', 'less')}")
    if checked in ("failed", "undecided"):
        parts.append(_check_words(loss_name, key, loss, failed=checked == "failed"))
    elif not loss.differs:
        parts.append(f"{loss_name} equal within noise")
    elif checked:
        parts.append(f"{loss_name} {loss.mean:+z.4f} nat, within the limit of {LOSS_LIMIT_NAT}")
    else:
        parts.append(f"{loss_name} is {_more(loss, 4, ' nat', 'higher', 'lower')}")
    return "; ".join(parts)


def _check_words(loss_name: str, key: str, loss: Estimate, *, failed: bool) -> str:
    moved = f"{loss_name} differs by {loss.mean:+z.4f} nat {_ends(loss, 4)}"
    if failed:
        must = f"{key} must not change what is learned" if key else "the arms are identical"
        return f"LOSS CHECK FAILED: {moved}, and {must}"
    return f"loss check UNDECIDED: {moved}, more than {LOSS_LIMIT_NAT} but within the noise"


def _more(found: Estimate, digits: int, unit: str, up: str, down: str) -> str:
    """Such as "7.1 % faster [6.4, 7.9]": size and word instead of a sign."""
    low, high = found.low, found.high
    if found.mean < 0:
        low, high = -high, -low
    word = up if found.mean > 0 else down
    return f"{abs(found.mean):.{digits}f}{unit} {word} {_ends(Estimate(0, low, high), digits)}"


def _ends(found: Estimate, digits: int) -> str:
    return f"[{found.low:z.{digits}f}, {found.high:z.{digits}f}]"
