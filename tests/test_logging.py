"""The training logger: its line, its files, and a resume that shows no row twice and drops none."""

import io
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from mamba3_lite.errors import UserError
from mamba3_lite.utils.logging import TrainingLogger, perplexity, read_metrics


def quiet(**options: Any) -> Console:
    return Console(file=io.StringIO(), **options)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(micro_step: int, **fields: Any) -> dict[str, Any]:
    base = {"opt_step": micro_step // 2, "micro_step": micro_step, "loss": 2.0, "lr": 1e-3}
    return base | {"tps": 10.0} | fields


def logger(run_dir: Path | None, **options: Any) -> TrainingLogger:
    defaults: dict[str, Any] = {"tensorboard": False, "console": quiet()}
    return TrainingLogger(run_dir, **(defaults | options))


def micro_steps(run_dir: Path, kind: str = "train") -> list[int]:
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [row["micro_step"] for row in rows if row["kind"] == kind]


class FakeRun:
    """Drops what W&B would: rows whose internal step does not increase, had anybody given one."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.axes: list[tuple[str, str | None]] = []
        self.rows: list[dict[str, Any]] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        if step is None or step >= len(self.rows):
            self.rows.append(data)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, FakeRun] = {}
        self.calls: list[dict[str, Any]] = []

    def init(self, **options: Any) -> FakeRun:
        self.calls.append(options)
        run_id = options["id"] or f"run{len(self.runs)}"
        return self.runs.setdefault(run_id, FakeRun(run_id))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "p")
    return fake


# --- the line ---------------------------------------------------------------------------------


def test_the_line_of_the_contract(tmp_path: Path) -> None:
    console = quiet()
    log = logger(tmp_path, console=console)
    first = {"opt_step": 3500, "micro_step": 7000, "loss": 6.8214, "lr": 3e-4, "tps": 142331.4}
    log.log(first)
    log.log(first | {"grad_norm": 1.234, "mfu": 0.4121, "dropped_windows": 3})
    line = "step=   3500 | loss=6.8214 | ppl=917.27 | lr=3.00e-04 | tps=142,331"
    assert f"{math.exp(6.8214):.2f}" == "917.27"
    assert shown(console) == f"{line}\n{line} | gnorm=1.23 | mfu=41.2%\n"
    assert (tmp_path / "train.log").read_text() == shown(console)


def test_values_may_be_tensors_and_numpy_scalars(tmp_path: Path) -> None:
    log = logger(tmp_path)
    log.log(row(2, loss=torch.tensor(1.5), grad_norm=torch.tensor(0.25), tps=np.float32(7.0)))
    (stored,) = read_metrics(tmp_path / "metrics.jsonl")
    assert stored.pop("time") > 0
    expected = {"kind": "train", **row(2, loss=1.5, grad_norm=0.25, tps=7.0), "ppl": math.exp(1.5)}
    assert stored == expected


def test_a_loss_beyond_every_float_is_shown_and_stays_json(tmp_path: Path) -> None:
    console = quiet()
    log = logger(tmp_path, console=console)
    log.log(row(1, loss=1e4))
    log.log(row(2, loss=math.nan, lr=torch.tensor(math.inf)))
    log.event("spike", "odd", values=[1.0, math.inf], nested={"a": -math.inf})
    lines = shown(console).splitlines()
    assert "loss=10000.0000 | ppl=inf |" in lines[0]
    assert "loss=nan | ppl=nan | lr=inf |" in lines[1]

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert (rows[0]["loss"], rows[0]["ppl"]) == (1e4, None)
    assert (rows[1]["loss"], rows[1]["ppl"], rows[1]["lr"]) == (None, None, None)
    assert (rows[2]["values"], rows[2]["nested"]) == ([1.0, None], {"a": None})
    assert perplexity(0.0) == 1.0


def test_validation_events_and_remarks(tmp_path: Path) -> None:
    console = quiet()
    log = logger(tmp_path, console=console)
    log.log(row(8))
    log.log_validation({"opt_step": 4, "micro_step": 8, "val_loss": 1.0, "val_tokens": 99})
    log.event("nan-guard", "[nan-guard] window dropped [bold]:boom:", micro_step=9, strikes=1)
    log.event("note", "no number of its own")
    log.info("a remark " + "x" * 200)
    lines = shown(console).splitlines()
    assert lines[1] == "[val] step=      4 | val_loss=1.0000 | val_ppl=2.72"
    assert lines[2] == "[nan-guard] window dropped [bold]:boom:"
    assert lines[4] == "a remark " + "x" * 200
    assert (tmp_path / "train.log").read_text().splitlines() == lines
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["kind"] for r in rows] == ["train", "val", "event", "event"]
    assert rows[1]["val_ppl"] == math.exp(1.0) and rows[1]["val_tokens"] == 99
    assert {"event": "nan-guard", "micro_step": 9, "strikes": 1}.items() <= rows[2].items()
    assert rows[3]["micro_step"] == 8


def test_a_dry_run_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: FakeWandb
) -> None:
    monkeypatch.chdir(tmp_path)
    console = quiet()
    with TrainingLogger(None, console=console) as log:
        log.log(row(1))
        log.event("x", "y")
        log.rewind(0)
    assert shown(console).startswith("step=      0 | loss=2.0000")
    assert list(tmp_path.iterdir()) == [] and wandb.calls == []


def test_an_unwritable_run_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write logs to .*file/run: Not a directory"):
        logger(tmp_path / "file" / "run")


# --- resuming ---------------------------------------------------------------------------------


def test_b16_resume_leaves_no_row_twice(tmp_path: Path) -> None:
    # case B16
    log = logger(tmp_path)
    for micro_step in (2, 4, 6, 8):
        log.log(row(micro_step))
        log.log_validation({"opt_step": 1, "micro_step": micro_step, "val_loss": 1.0})
        log.event("note", "text", micro_step=micro_step)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "micro_st')  # a kill inside a write
    again = logger(tmp_path, resume_micro_step=4)
    for kind in ("train", "val", "event"):
        assert micro_steps(tmp_path, kind) == [2, 4]
    again.event("note", "belongs to the point of resumption")
    again.log(row(6))
    assert micro_steps(tmp_path) == [2, 4, 6]
    assert micro_steps(tmp_path, "event") == [2, 4, 4]
    assert len((tmp_path / "train.log").read_text().splitlines()) == 14  # history is kept
    assert {path.name for path in tmp_path.iterdir()} == {"train.log", "metrics.jsonl"}


def test_a_new_run_in_a_used_folder_starts_a_new_metrics_file(tmp_path: Path) -> None:
    logger(tmp_path).log(row(2, loss=9.0))
    logger(tmp_path).log(row(2, loss=1.0))
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]


def test_after_a_rollback_rows_are_forgotten_and_events_stay(tmp_path: Path) -> None:
    log = logger(tmp_path)
    for micro_step in (2, 4, 6):
        log.log(row(micro_step))
    log.event("nan-guard", "five in a row", micro_step=6)
    log.rewind(2)
    log.event("rollback", "back to 2")
    log.log(row(4))
    assert micro_steps(tmp_path) == [2, 4]
    assert micro_steps(tmp_path, "event") == [6, 2]


def test_metrics_are_untouched_when_the_rewrite_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger(tmp_path).log(row(2))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left on device"):
        logger(tmp_path, resume_micro_step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_read_metrics_forgives_only_a_last_line_in_the_making(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_metrics(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\noops\n{"a": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_metrics(path)
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(tmp_path / "none.jsonl")


# --- W&B and TensorBoard ----------------------------------------------------------------------


def test_b16_wandb_continues_the_same_run_and_drops_nothing(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case B16
    monkeypatch.setenv("WANDB_RUN_NAME", "first")
    with logger(tmp_path, config={"lr": 1}) as log:
        for micro_step in (2, 4, 6):
            log.log(row(micro_step))
        stored_in_checkpoint = log.wandb_id
    assert stored_in_checkpoint == "run0"
    with logger(tmp_path, resume_micro_step=2, wandb_id=stored_in_checkpoint) as log:
        assert log.wandb_id == "run0"
        for micro_step in (4, 6, 8):
            log.log(row(micro_step))
        log.log_validation({"opt_step": 4, "micro_step": 8, "val_loss": 1.0, "note": "text"})
    assert list(wandb.runs) == ["run0"]
    run = wandb.runs["run0"]
    assert run.axes[:2] == [("opt_step", None), ("*", "opt_step")]
    assert [data["micro_step"] for data in run.rows] == [2, 4, 6, 4, 6, 8, 8]
    assert run.rows[0]["opt_step"] == 1 and run.rows[0]["train/loss"] == 2.0
    assert run.rows[-1]["val/val_loss"] == 1.0 and "val/note" not in run.rows[-1]
    assert run.exit_code == 0
    assert wandb.calls[0] == {
        "project": "p",
        "name": "first",
        "id": None,
        "resume": "allow",
        "config": {"lr": 1},
        "dir": str(tmp_path),
    }
    assert wandb.calls[1]["id"] == "run0" and wandb.calls[1]["resume"] == "allow"


def test_a_failed_run_is_marked_as_failed(tmp_path: Path, wandb: FakeWandb) -> None:
    with pytest.raises(KeyError), logger(tmp_path):
        raise KeyError("x")
    assert wandb.runs["run0"].exit_code == 1
    assert wandb.calls[0]["name"] is None


def test_wandb_asked_for_but_missing_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger(tmp_path)  # not asked for: not missed
    monkeypatch.setenv("WANDB_PROJECT", "p")
    with pytest.raises(UserError, match=re.escape('pip install "mamba3-lite[wandb]"')):
        logger(tmp_path)


def test_missing_tensorboard_is_one_quiet_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    console = quiet()
    with logger(tmp_path, tensorboard=True, console=console) as log:
        log.log(row(1))
    lines = shown(console).splitlines()
    assert len(lines) == 2
    assert "no TensorBoard" in lines[0] and 'pip install "mamba3-lite[tensorboard]"' in lines[0]


def test_tensorboard_rows_after_the_point_of_resumption_are_purged(tmp_path: Path) -> None:
    # case B16
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def points() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert "train/opt_step" in events.Tags()["scalars"]
        return [(event.step, event.value) for event in events.Scalars("train/loss")]

    with logger(tmp_path, tensorboard=True) as log:
        for micro_step in (2, 4, 6):
            log.log(row(micro_step, loss=1.0))
    with logger(tmp_path, tensorboard=True, resume_micro_step=4) as log:
        log.log(row(6, loss=2.0))
        assert points() == [(2, 1.0), (4, 1.0), (6, 2.0)]
        log.rewind(2)
        log.log(row(4, loss=3.0))
    assert points() == [(2, 1.0), (4, 3.0)]


# --- progress ---------------------------------------------------------------------------------


def test_the_bar_lives_on_a_terminal_and_lines_print_above_it(tmp_path: Path) -> None:
    console = quiet(force_terminal=True, width=100)
    with logger(tmp_path, console=console) as log:
        log.progress(20, 4)
        log.advance(5, torch.tensor(1.25))
        log.log(row(10))
        log.advance(20, None)
    text = shown(console)
    assert "20/20" in text and "loss 1.2500" in text and "opt steps/s" in text and "ETA" in text
    assert text.index("step=      5 |") < text.index("20/20")
    assert (tmp_path / "train.log").read_text().count("\n") == 1


def test_there_is_no_bar_without_a_terminal() -> None:
    console = quiet(force_terminal=False)
    with logger(None, console=console) as log:
        log.progress(20, 0)
        log.advance(1, 1.0)
    assert shown(console) == ""
