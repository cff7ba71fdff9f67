"""Sharded checkpoints of a run: as exact as the three files, and as hard to lose."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.export.convert import convert
from mamba3_lite.models.pretrained import build_model, read_weights
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.utils import sharded
from mamba3_lite.utils.checkpoint import CheckpointManager
from mamba3_lite.utils.logging import read_metrics
from tests.runs import assert_same_weights, config, final_weights, losses, stop_after
from tests.test_checkpoint import dead_pid, flip

SHARDED = {"checkpoint_format": "sharded"}
PREFIX = ".mamba3lite-tmp-"


def trained(folder: Path, **changes: Any) -> Path:
    """The run folder of a finished run."""
    folder.mkdir(exist_ok=True)
    settings = config(folder, **changes)
    assert Pretrainer(settings).train() == 0
    return Path(settings.checkpoint_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of optimizer steps 4, 8 and 12."""
    return trained(tmp_path_factory.mktemp("sharded"), **SHARDED)


def test_a_run_ends_as_one_that_saves_in_files(run: Path, tmp_path: Path) -> None:
    files = trained(tmp_path)
    assert losses(run) == losses(files)
    assert_same_weights(final_weights(run), final_weights(files))
    assert sorted(p.name for p in run.glob("*_step_12*")) == ["meta_step_12.json", "shards_step_12"]
    one, other = (CheckpointManager(folder).load(12) for folder in (run, files))
    assert one is not None and other is not None
    assert one.meta["state"] == other.meta["state"]
    ours, theirs = one.training["optimizer"], other.training["optimizer"]
    assert (
        ours["param_groups"] == theirs["param_groups"]
        and ours["state"].keys() == theirs["state"].keys()
    )
    for index, moments in theirs["state"].items():
        assert all(torch.equal(ours["state"][index][name], moments[name]) for name in moments)
    assert one.model["lm_head.weight"] is one.model["embed.weight"]


@pytest.mark.parametrize("first, then", [("sharded", "files"), ("files", "sharded")])
def test_a_run_goes_on_exactly_in_the_other_format(
    run: Path, tmp_path: Path, first: str, then: str
) -> None:
    settings = config(tmp_path, checkpoint_format=first)
    assert stop_after(settings, 13) == 143
    settings.checkpoint_format = then
    assert Pretrainer(settings).train() == 0
    assert losses(tmp_path / "run") == losses(run)
    assert_same_weights(final_weights(tmp_path / "run"), final_weights(run))


def test_any_damage_is_noticed_and_the_next_older_one_is_taken(run: Path, tmp_path: Path) -> None:
    # case B06
    whole = CheckpointManager(run).load(8)
    parts = sorted(p.name for p in (run / "shards_step_12").iterdir())
    assert parts == [".metadata", "__0_0.distcp", "rest.pt"]
    for name in parts:
        for kind in ("truncated", "flipped", "deleted"):
            broken = tmp_path / f"{name}-{kind}"
            shutil.copytree(run, broken)
            path = broken / "shards_step_12" / name
            if kind == "truncated":
                os.truncate(path, path.stat().st_size // 2)
            elif kind == "flipped":
                flip(path, path.stat().st_size // 2)
            else:
                path.unlink()
            lines: list[str] = []
            manager = CheckpointManager(broken, log=lines.append)
            reason = manager.verify(12)
            assert reason is not None and name in reason
            taken = manager.load(None)
            assert taken is not None and whole is not None and taken.opt_step == 8
            assert_same_weights(taken.model, whole.model)
            assert lines[0] == f"[checkpoint] step 12 passed over: {reason}"


def test_old_ones_go(tmp_path: Path) -> None:
    left = trained(tmp_path, keep_last=2, save_every=3, **SHARDED)
    steps = sorted(p.name for p in left.glob("*_step_*"))
    assert steps == ["meta_step_12.json", "meta_step_9.json", "shards_step_12", "shards_step_9"]
    assert not list(left.glob(f"{PREFIX}*"))


@pytest.mark.parametrize("moment", ["before the record", "before renaming", "between"])
def test_a_kill_between_the_files_loses_nothing(run: Path, tmp_path: Path, moment: str) -> None:
    folder, pid = tmp_path / "run", dead_pid()
    shutil.copytree(run, folder)
    meta, shards = folder / "meta_step_12.json", folder / "shards_step_12"
    meta.rename(folder / f"{PREFIX}{pid}-{meta.name}")
    if moment != "between":
        shards.rename(folder / f"{PREFIX}{pid}-{shards.name}")
    if moment == "before the record":
        (folder / f"{PREFIX}{pid}-{meta.name}").unlink()
    manager = CheckpointManager(folder, log=lambda line: None)
    found = manager.load(None)
    assert found is not None and found.opt_step == (8 if moment == "before the record" else 12)
    # What could not be finished is removed by the next save.
    manager.save(13, {"w": torch.ones(1)}, {}, {})
    assert not list(folder.glob(f"{PREFIX}*")) and 13 in manager.steps()


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case B07
    write, failed = sharded.write, []

    def full(folder: Path, *rest: Any) -> list[Path]:
        if not failed:
            failed.append(folder)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, *rest)

    monkeypatch.setattr(sharded, "write", full)
    folder = trained(tmp_path, **SHARDED)
    events = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "event"]
    assert [e["event"] for e in events] == ["save-failed"]
    assert "No space left" in events[0]["message"] and "older checkpoints" in events[0]["message"]
    assert CheckpointManager(folder).steps() == [8, 12]
    assert not list(folder.glob(f"{PREFIX}*"))


def test_the_last_checkpoint_that_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*rest: Any) -> list[Path]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sharded, "write", full)
    with pytest.raises(UserError, match=r"last checkpoint could not be written.*No space left"):
        trained(tmp_path, **SHARDED)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is what was, not what has become of it meanwhile."""
    write, seen = sharded.write, []
    settings = config(tmp_path, **SHARDED)
    trainer = Pretrainer(settings)

    def slow(folder: Path, *rest: Any) -> list[Path]:
        before = trainer.state.micro_step
        while trainer.state.opt_step < settings.max_steps and trainer.state.micro_step < before + 3:
            pass
        seen.append(trainer.state.micro_step - before)
        return write(folder, *rest)

    monkeypatch.setattr(sharded, "write", slow)
    assert trainer.train() == 0
    assert seen[:2] == [3, 3]
    quiet = trained(tmp_path / "quiet", **SHARDED)
    for opt_step in (4, 8, 12):
        one, other = (CheckpointManager(f).load(opt_step) for f in (tmp_path / "run", quiet))
        assert one is not None and other is not None
        assert_same_weights(one.model, other.model)


def test_converted_there_and_back_is_what_it_was(run: Path, tmp_path: Path) -> None:
    files, parts, again = (tmp_path / name for name in ("files", "parts", "again"))
    assert convert(run, files, to="files") == 12
    assert convert(files, parts, to="sharded") == 12
    assert convert(parts, again, to="files") == 12
    one, other = (CheckpointManager(folder).load(12) for folder in (files, again))
    assert one is not None and other is not None and one.meta == other.meta
    for name in ("model_step_12.safetensors", "meta_step_12.json"):
        assert (files / name).read_bytes() == (again / name).read_bytes()
    assert_same_weights(other.model, final_weights(run))
    with pytest.raises(UserError, match="holds a checkpoint of step 12 already"):
        convert(run, files, to="files")
    with pytest.raises(UserError, match="holds no checkpoint"):
        convert(tmp_path / "nowhere", tmp_path / "new", to="files")


def test_the_other_commands_read_them(run: Path) -> None:
    weights = read_weights(run, log=lambda line: None)
    assert weights.opt_step == 12 and len(weights.sha256()) == 64
    assert weights.file.name == "meta_step_12.json"
    assert_same_weights(dict(build_model(weights).state_dict()), final_weights(run))
