"""What a run says: console lines, train.log, metrics.jsonl, TensorBoard, W&B and a progress bar.

The same row goes to every sink. Rows are identified by their ``micro_step``, so a resumed run first
removes what an earlier one logged beyond the point of resumption: no sink shows a row twice.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from mamba3_lite import env
from mamba3_lite.errors import UserError

# Fields that join the line of a training row when it has them; all others go to the files only.
_EXTRAS = {"grad_norm": "gnorm={:.2f}", "mfu": "mfu={:.1%}"}
_LOG, _METRICS = "train.log", "metrics.jsonl"


def perplexity(loss: float) -> float:
    """exp(loss): inf where that overflows, NaN for NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, a last line that is still being written left out.

    Numbers that were not finite are None. ``UserError`` if the file is absent or not JSON lines.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: no run has logged there") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UserError(f"{path}, line {number} is not a JSON object; remove that line")
    return rows


class TrainingLogger:
    """All sinks of one run; use it as a context manager or call ``close``.

    Args:
        run_dir: folder for train.log, metrics.jsonl and tensorboard/; None (a dry run) writes to
            the console only.
        resume_micro_step: rows logged beyond it are removed first.
        config: resolved configuration, shown by W&B.
        wandb_id: run to continue; ``wandb_id`` of this object belongs into the checkpoint's meta.
        tensorboard: False leaves TensorBoard out; without the package one line says so.
        console: where lines and the progress bar go; standard output by default.

    W&B joins in when WANDB_PROJECT is set. Raises ``UserError`` when the folder cannot be written
    or wandb is asked for but not installed.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        resume_micro_step: int = 0,
        config: dict[str, Any] | None = None,
        wandb_id: str | None = None,
        tensorboard: bool = True,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self.wandb_id = wandb_id
        self._micro_step = resume_micro_step
        self._run_dir = run_dir
        self._sinks: list[_TensorBoard | _Wandb] = []
        self._progress: Progress | None = None
        if run_dir is None:
            return
        # First: a refusal must not leave files behind.
        wandb = _import_wandb() if env.is_set("WANDB_PROJECT") else None
        self._prepare_files(run_dir, resume_micro_step)
        if tensorboard:
            self._start_tensorboard(run_dir, resume_micro_step)
        if wandb is not None:
            run = _Wandb(wandb, run_dir, config, wandb_id)
            self.wandb_id = run.id
            self._sinks.append(run)

    def log(self, row: Mapping[str, Any]) -> None:
        """One training row: opt_step, micro_step, loss, lr, tps and any further numbers.

        Values may be 0-d tensors. ppl is added. ``grad_norm`` and ``mfu`` (a fraction) join the
        line when present, everything else goes to the files only:
        ``step=   3500 | loss=6.8214 | ppl=916.32 | lr=3.00e-04 | tps=142,331 | gnorm=1.23``.
        """
        data = _plain(row)
        data["ppl"] = perplexity(data["loss"])
        parts = [
            f"step={data['opt_step']:7d}",
            f"loss={data['loss']:.4f}",
            f"ppl={data['ppl']:.2f}",
            f"lr={data['lr']:.2e}",
            f"tps={data['tps']:,.0f}",
            *(style.format(data[name]) for name, style in _EXTRAS.items() if name in data),
        ]
        self._write("train", data, " | ".join(parts))

    def log_validation(self, row: Mapping[str, Any]) -> None:
        """One validation row: opt_step, micro_step, val_loss and any further numbers."""
        data = _plain(row)
        data["val_ppl"] = perplexity(data["val_loss"])
        self._write(
            "val",
            data,
            f"[val] step={data['opt_step']:7d} | val_loss={data['val_loss']:.4f} "
            f"| val_ppl={data['val_ppl']:.2f}",
        )

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Something that happened, such as ``event("nan-guard", "[nan-guard] ...", micro_step=7)``.

        The message is shown as it is. Without a ``micro_step`` the event belongs to the last row.
        """
        self.info(message)
        data = {"event": kind, "message": message, "micro_step": self._micro_step}
        self._append_row("event", data | _plain(fields))

    def info(self, message: str) -> None:
        """A line for people: console and train.log only."""
        self.console.print(message, markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._append(_LOG, message)

    def rewind(self, micro_step: int) -> None:
        """After a rollback to ``micro_step``: forget the rows beyond it, which are to come again.

        Events stay, for they tell why.
        """
        self._micro_step = micro_step
        if self._run_dir is not None:
            _drop_rows(self._run_dir / _METRICS, micro_step, keep_events=True)
        for sink in self._sinks:
            if isinstance(sink, _TensorBoard):  # the history of a W&B run only grows
                sink.rewind(micro_step)

    def progress(self, total_opt_steps: int, start: int) -> None:
        """Show a live bar from ``start`` to ``total_opt_steps`` if the console is a terminal."""
        if not self.console.is_terminal or self._progress is not None:
            return
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            _Speed(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=4,
            speed_estimate_period=300,  # opt steps of big models take many seconds
        )
        self._progress.add_task("", total=total_opt_steps, completed=start, loss="-")
        self._progress.start()

    def advance(self, opt_step: int, loss: float | Tensor | None) -> None:
        """Move the bar; None keeps the loss shown. A device tensor costs a synchronisation."""
        if self._progress is None:
            return
        task = self._progress.tasks[0]
        if loss is not None:
            task.fields["loss"] = f"{float(loss):.4f}"
        self._progress.update(task.id, completed=opt_step)

    def close(self, *, failed: bool = False) -> None:
        """Stop the bar and close every sink; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
        for sink in self._sinks:
            sink.close(failed)
        self._progress, self._sinks = None, []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    def _prepare_files(self, run_dir: Path, resume_micro_step: int) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            for name in (_LOG, _METRICS):
                with open(run_dir / name, "a"):
                    pass  # an unwritable folder is better noticed now than at the first row
            _drop_rows(run_dir / _METRICS, resume_micro_step, keep_events=False)
        except OSError as error:
            raise UserError(
                f"cannot write logs to {run_dir}: {error.strerror}; make it writable or choose "
                "another run folder"
            ) from error

    def _start_tensorboard(self, run_dir: Path, resume_micro_step: int) -> None:
        try:
            self._sinks.append(_TensorBoard(run_dir / "tensorboard", resume_micro_step))
        except ImportError as error:
            self.info(
                f'[log] no TensorBoard ({error}); pip install "mamba3-lite[tensorboard]" adds it'
            )

    def _write(self, kind: str, data: dict[str, Any], line: str) -> None:
        self._micro_step = data["micro_step"]
        self.info(line)
        self._append_row(kind, data)
        for sink in self._sinks:
            sink.write(kind, data)

    def _append_row(self, kind: str, data: dict[str, Any]) -> None:
        row = {"kind": kind, **data, "time": round(time.time(), 3)}
        self._append(_METRICS, json.dumps(_strict(row), allow_nan=False))

    def _append(self, name: str, line: str) -> None:
        # Opened for each line: rows are rare, and a kill costs none that was finished.
        if self._run_dir is not None:
            with open(self._run_dir / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")


class _TensorBoard:
    """Scalars over ``micro_step``, the number that rows are identified by, so purging is exact."""

    def __init__(self, folder: Path, resume_micro_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(folder))
        self._writer = self._open(purge_step=resume_micro_step + 1)

    def write(self, kind: str, data: dict[str, Any]) -> None:
        for key, value in _numbers(data).items():
            if key != "micro_step":
                self._writer.add_scalar(f"{kind}/{key}", value, data["micro_step"])
        self._writer.flush()

    def rewind(self, micro_step: int) -> None:
        self._writer.close()
        self._writer = self._open(purge_step=micro_step + 1)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """A W&B run with ``opt_step`` as its axis.

    W&B drops rows whose own internal step does not increase, which happens to every row that is
    logged again after a resume from an older checkpoint; with an axis of our own none is dropped.
    """

    def __init__(
        self, wandb: Any, run_dir: Path, config: dict[str, Any] | None, run_id: str | None
    ) -> None:
        self._run = wandb.init(
            project=env.read("WANDB_PROJECT"),
            name=env.read("WANDB_RUN_NAME") or None,
            id=run_id,
            resume="allow",
            config=config,
            dir=str(run_dir),
        )
        self._run.define_metric("opt_step")
        self._run.define_metric("*", step_metric="opt_step")
        self.id: str = self._run.id

    def write(self, kind: str, data: dict[str, Any]) -> None:
        axes = {"opt_step", "micro_step"}
        self._run.log(
            {key if key in axes else f"{kind}/{key}": n for key, n in _numbers(data).items()}
        )

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"WANDB_PROJECT is set but wandb cannot be imported ({error}); "
            'pip install "mamba3-lite[wandb]" or unset WANDB_PROJECT'
        ) from None
    return wandb


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = "-" if task.speed is None else f"{task.speed:.2f}"
        return Text(f"{speed} opt steps/s")


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with 0-d tensors and numpy scalars turned into Python numbers."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in row.items()}


def _numbers(data: dict[str, Any]) -> dict[str, int | float]:
    return {key: value for key, value in data.items() if isinstance(value, int | float)}


def _strict(value: Any) -> Any:
    """The value with non-finite floats as None: NaN is not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _drop_rows(path: Path, micro_step: int, *, keep_events: bool) -> None:
    """Drop rows beyond ``micro_step`` and torn lines; all or nothing."""
    text = path.read_text(encoding="utf-8", errors="replace")
    wanted = ""
    for line in text.splitlines():
        row = _parse(line)
        if row is None:
            continue
        if row.get("micro_step", 0) <= micro_step or (keep_events and row["kind"] == "event"):
            wanted += line + "\n"
    if wanted == text:
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(wanted)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
