"""Runs that start from trained weights: those weights and nothing else of the run they are from."""

import re
from pathlib import Path

import pytest
import yaml

from mamba3_lite import cli
from mamba3_lite.errors import UserError
from mamba3_lite.export.hf import export_hf
from mamba3_lite.inference.generate import load_model
from mamba3_lite.models.pretrained import read_weights
from mamba3_lite.schema import COMMAND_LINE
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.training.train_state import TrainState
from mamba3_lite.utils.checkpoint import CheckpointManager
from tests import runs


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("base")
    assert Pretrainer(runs.config(folder, save_every=6, lr=2e-2)).train() == 0
    return folder / "run"


def tuning(folder: Path, source: Path | str, **changes):
    """A run elsewhere, on other data, with another schedule."""
    data = runs.write_tokens(folder / "other.bin", 24 * 31 + 1, seed=9)
    settings = {"data_path": data, "max_steps": 6, "lr": 1e-3, "seed": 5, "save_every": 3}
    return runs.config(folder, init_from=str(source), **{**settings, **changes})


@pytest.mark.parametrize("kind", ["run folder", "checkpoint", "export"])
def test_a_run_starts_from_weights_alone(kind, base, tmp_path):
    source, step = base, 12
    if kind == "checkpoint":
        source, step = base / "model_step_6.safetensors", 6
    elif kind == "export":
        source = export_hf(base, tmp_path / "exported", tokenizer="none")
    trainer = Pretrainer(tuning(tmp_path, source))
    runs.assert_same_weights(trainer.model.state_dict(), load_model(base, step).state_dict())
    assert trainer.state == TrainState() and not trainer.optimizer.state
    assert trainer.scheduler.get_last_lr()[0] == pytest.approx(1e-3 * 0.01)
    assert trainer.train() == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"(opt_step {step}, SHA-256" in log and "begin anew" in log
    saved = CheckpointManager(tmp_path / "run").load(None)
    weights = read_weights(source)
    assert saved.meta["init_from"] == {
        "source": str(source), "file": str(weights.file.resolve()), "opt_step": step,
        "sha256": weights.sha256(),
    }  # fmt: skip
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["config"]["init_from"] == str(source)
    # Trained on, and better for it: the first loss is below that of a run from random weights.
    Pretrainer(tuning(tmp_path / "run", "", max_steps=4)).train()
    fresh = runs.losses(tmp_path / "run" / "run")[0][1]
    assert runs.losses(tmp_path / "run")[0][1] < fresh - 0.3


def test_how_the_model_is_computed_may_differ_and_what_it_is_may_not(base, tmp_path):
    free = {"chunk_size": 4, "ssd_dispatch": "pytorch", "max_seq_len": 48, "init_std": 0.5}
    trainer = Pretrainer(tuning(tmp_path, base, model=free, max_steps=4))
    runs.assert_same_weights(trainer.model.state_dict(), load_model(base).state_dict())
    other = {"d_model": 32, "rms_norm_eps": 1e-3, "weight_tying": False}
    with pytest.raises(UserError) as problem:
        Pretrainer(tuning(tmp_path, base, model=other, checkpoint_dir=str(tmp_path / "x")))
    assert "model.d_model: 16 there, 32 here" in str(problem.value)
    assert "model.rms_norm_eps: 1e-05 there, 0.001 here" in str(problem.value)
    assert "model.weight_tying: True there, False here" in str(problem.value)
    assert not (tmp_path / "x").exists()


def test_a_stopped_run_goes_on_and_its_start_is_not_read_again(base, tmp_path, monkeypatch):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    assert Pretrainer(tuning(tmp_path / "whole", base)).train() == 0
    settings = tuning(tmp_path / "cut", base)
    assert runs.stop_after(settings, 5) == 143
    monkeypatch.setattr("mamba3_lite.training.pretrain.start_from", None)
    assert Pretrainer(settings).train() == 0
    log = (tmp_path / "cut" / "run" / "train.log").read_text()
    assert re.search(r"resuming: the weights of .* were its start, not read again", log)
    got, want = (CheckpointManager(tmp_path / f / "run").load(None) for f in ("cut", "whole"))
    runs.assert_same_weights(got.model, want.model)
    assert got.meta["init_from"] == want.meta["init_from"]


@pytest.mark.parametrize("source", ["", "another"])
def test_a_run_with_another_start_is_not_resumed(source, base, tmp_path):
    assert Pretrainer(tuning(tmp_path, base)).train() == 0
    with pytest.raises(UserError, match=f"changed training.init_from: '.*' -> '{source}'"):
        Pretrainer(tuning(tmp_path, source))
    # Least of all one that is to start from its own folder.
    with pytest.raises(UserError, match="Cannot resume .* changed training.init_from"):
        Pretrainer(tuning(tmp_path, tmp_path / "run"))


def test_a_dry_run_reads_the_weights_and_writes_nothing(base, tmp_path):
    settings = tuning(tmp_path, base)
    before = sorted(tmp_path.rglob("*"))
    trainer = Pretrainer(settings, dry_run=True)
    runs.assert_same_weights(trainer.model.state_dict(), load_model(base).state_dict())
    assert trainer.train() == 0 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{tmp}/nowhere", "nowhere is not a folder; name a run folder or an exported folder"),
        ("{tmp}", "holds no checkpoint"),
        ("{base}/metrics.jsonl", "metrics.jsonl is no file of a checkpoint"),
        ("{base}/model_step_7.safetensors", "model_step_7.safetensors is not a folder"),
    ],
)
def test_the_command_line(source, line, base, tmp_path, capsys):
    settings = tuning(tmp_path, "")
    document = {
        "model": runs.MODEL,
        "training": {
            "micro_batch_size": 3, "total_steps": 4, "warmup_steps": 1, "compile": False,
            "save_dir": str(tmp_path / "run"), "tensorboard": False,
        },
        "data": {"train_data_path": settings.data_path},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(document))
    argv = ["pretrain", "--config", str(tmp_path / "c.yaml"), "--init-from"]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        cli.main([*argv, source.format(tmp=tmp_path, base=base)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and line in said
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(SystemExit) as stop:
        cli.main([*argv, str(base)])
    assert not stop.value.code
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["sources"]["training.init_from"] == COMMAND_LINE
    saved = CheckpointManager(tmp_path / "run").load(None)
    assert saved is not None and saved.meta["init_from"]["opt_step"] == 12
