"""What a monitoring system reads of a run: is it alive, how does it do, how did it end."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba3_lite.utils.checkpoint import CheckpointManager

HEARTBEAT, METRICS, EXIT_CODE = "heartbeat.json", "metrics.prom", "exit_code"
STATES = ("starting", "training", "validating", "saving", "done", "stopped", "failed", "hung")


@dataclass(frozen=True)
class Metric:
    """A number of the heartbeat as Prometheus knows it: in base units."""

    name: str
    kind: str
    text: str
    field: str
    factor: float = 1


_METRICS = (
    Metric("opt_step", "gauge", "Optimizer steps done.", "opt_step"),
    Metric("micro_step", "gauge", "Micro-steps done.", "micro_step"),
    Metric("loss", "gauge", "Mean loss since the log row before, in nat a token.", "loss"),
    Metric("validation_loss", "gauge", "Loss of the newest validation, in nat.", "val_loss"),
    Metric("learning_rate", "gauge", "Learning rate of the next update.", "lr"),
    Metric("grad_norm", "gauge", "Global gradient norm before clipping.", "grad_norm"),
    Metric("tokens_per_second", "gauge", "Tokens a second, of all ranks.", "tps"),
    Metric("peak_memory_bytes", "gauge", "Peak memory of the rank that took most.",
           "peak_mem_gib", 2**30),
    Metric("ranks", "gauge", "Processes that train together.", "ranks"),
    Metric("longest_wait_seconds", "gauge", "Time the fastest rank waited for the slowest.",
           "longest_wait_sec"),
    Metric("tokens_seen_total", "counter", "Tokens trained on.", "tokens_seen"),
    Metric("dropped_windows_total", "counter", "Windows the guard has dropped.", "dropped_windows"),
    Metric("last_checkpoint_opt_step", "gauge", "Optimizer step of the newest checkpoint.",
           "last_checkpoint_opt_step"),
    Metric("last_checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was written.",
           "last_checkpoint_time"),
    Metric("heartbeat_timestamp_seconds", "gauge", "When the run last got on.", "time"),
)  # fmt: skip


class Heartbeat:
    """Files of a run folder, each replaced as a whole, so a reader never sees half of one.

    - ``heartbeat.json``: state, time and the newest numbers.
    - ``metrics.prom``: the same for the textfile collector of Prometheus's node_exporter.
    - ``exit_code``: one number, once the run has ended in a way that it knows. torchrun makes 1 of
      every code but 0, so a launcher asks here.
    """

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._checkpoints = CheckpointManager(run_dir)

    def forget_exit(self) -> None:
        """Removes what an earlier job has left."""
        (self._run_dir / EXIT_CODE).unlink(missing_ok=True)

    def ended(self, exit_code: int) -> None:
        """Writes ``exit_code``."""
        self._replace(EXIT_CODE, f"{exit_code}\n")

    def write(self, state: str, time: float, facts: Mapping[str, Any]) -> None:
        """Writes both other files.

        Args:
            state: one of ``STATES``.
            time: when the run last got on, in seconds since 1970.
            facts: any of the fields of a training row of metrics.jsonl.
        """
        assert state in STATES
        numbers: dict[str, Any] = {"time": round(time, 3), **facts, **self._newest_checkpoint()}
        plain = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        self._replace(HEARTBEAT, json.dumps({"state": state, **plain}) + "\n")
        self._replace(METRICS, "\n".join(_prometheus(self._run_dir.name, state, numbers)) + "\n")

    def _newest_checkpoint(self) -> dict[str, float]:
        opt_steps = self._checkpoints.steps()
        if not opt_steps:
            return {}
        meta = self._run_dir / f"meta_step_{opt_steps[-1]}.json"
        try:
            written = round(meta.stat().st_mtime, 3)
        except FileNotFoundError:  # a save of the same step is replacing it
            return {}
        return {"last_checkpoint_opt_step": opt_steps[-1], "last_checkpoint_time": written}

    def _replace(self, name: str, text: str) -> None:
        # Any rank may write: the one that hangs says so.
        temporary = self._run_dir / f".{name}.rank_{self._rank}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self._run_dir / name)


def _prometheus(run: str, state: str, numbers: Mapping[str, float]) -> Iterator[str]:
    """Lines of the text format; the label keeps the runs of one host apart."""
    escaped = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    for metric in _METRICS:
        value = numbers.get(metric.field)
        if value is not None:
            yield from _head(metric.name, metric.kind, metric.text)
            number = repr(metric.factor * value).replace("inf", "Inf").replace("nan", "NaN")
            yield f'mamba3_{metric.name}{{run="{escaped}"}} {number}'
    yield from _head("state", "gauge", "1 for the state that the run is in.")
    for one in STATES:
        yield f'mamba3_state{{run="{escaped}",state="{one}"}} {int(one == state)}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP mamba3_{name} {text}"
    yield f"# TYPE mamba3_{name} {kind}"
