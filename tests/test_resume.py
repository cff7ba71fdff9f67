"""Stop anywhere, go on, and nothing differs to the last bit: losses, rates, weights, the log."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from mamba3_lite.errors import UserError
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.compile import compile_blocks
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.training.schedule import lr_factor
from mamba3_lite.training.stop import EXIT_OUT_OF_TIME
from mamba3_lite.utils.checkpoint import CheckpointManager
from mamba3_lite.utils.logging import read_metrics
from mamba3_lite.utils.weights import load_weights
from tests.runs import (
    MODEL,
    assert_same_weights,
    config,
    final_weights,
    losses,
    stop_after,
    write_tokens,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run that every interrupted one must equal."""
    folder = tmp_path_factory.mktemp("whole")
    assert Pretrainer(config(folder)).train() == 0
    return folder / "run"


# case B04: accumulation 2, shuffled, 72 samples over epochs of 31
@pytest.mark.parametrize("micro_steps", [1, 2, 7, 8, 13, 21, 22])
def test_acc7_b04_bitwise_exact_resume(whole, tmp_path, micro_steps):
    """SIGTERM inside and between accumulation windows, before and after both epoch ends."""
    assert stop_after(config(tmp_path), micro_steps) == 143
    assert Pretrainer(config(tmp_path)).train() == 0
    assert losses(tmp_path / "run") == losses(whole)
    assert_same_weights(final_weights(tmp_path / "run"), final_weights(whole))


def test_acc7_b04_many_stops_in_one_run(whole, tmp_path):
    """A stop after every third micro-step, with log windows that straddle the saves."""
    settings = config(tmp_path)
    codes = []
    while not codes or codes[-1] != 0:
        codes.append(stop_after(settings, 3, signal.SIGINT))
    assert codes[:-1] == [130] * (len(codes) - 1) and len(codes) > 6
    assert losses(tmp_path / "run") == losses(whole)
    assert_same_weights(final_weights(tmp_path / "run"), final_weights(whole))


@pytest.mark.parametrize("micro_steps", [8, 10, 11])
def test_log_windows_survive_a_stop(tmp_path, micro_steps):
    """The stop cuts windows of five micro-steps; their means are those of the uninterrupted run."""
    for name, stop in (("a", None), ("b", micro_steps)):
        folder = tmp_path / name
        folder.mkdir()
        settings = config(folder, log_every=5, save_every=3)
        if stop is not None:
            stop_after(settings, stop)
        Pretrainer(settings).train()
    assert losses(tmp_path / "a" / "run") == losses(tmp_path / "b" / "run")


def test_acc6_b02_learning_rate_trace_is_that_of_the_schedule_after_a_resume(tmp_path):
    settings = config(tmp_path)
    stop_after(settings, 9)
    Pretrainer(settings).train()
    rates = [rate for step, _, rate in losses(tmp_path / "run") if step % 2 == 0]
    shape = {"warmup_steps": 3, "max_steps": 12, "min_lr_ratio": 0.05}
    assert rates == [settings.lr * lr_factor(s, **shape) for s in range(1, 13)]


def test_optimizer_moments_and_counters_are_exact(whole, tmp_path):
    stop_after(config(tmp_path), 11)
    Pretrainer(config(tmp_path)).train()
    ours, theirs = (CheckpointManager(folder).load(12) for folder in (tmp_path / "run", whole))
    assert ours.meta["state"] == theirs.meta["state"]
    for number, moments in theirs.training["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(ours.training["optimizer"]["state"][number][name], value)


def test_validation_has_no_influence_on_training(whole, tmp_path):
    val = write_tokens(tmp_path / "val.bin", 24 * 5 + 1, seed=3)
    Pretrainer(config(tmp_path, val_data_path=val, eval_interval=2)).train()
    assert losses(tmp_path / "run") == losses(whole)
    assert_same_weights(final_weights(tmp_path / "run"), final_weights(whole))
    rows = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "val"]
    assert [r["opt_step"] for r in rows] == [2, 4, 6, 8, 10, 12]
    assert all(r["val_tokens"] == 120 for r in rows) and rows[-1]["val_loss"] < rows[0]["val_loss"]


def test_resume_exactly_from_an_older_checkpoint(whole, tmp_path):
    settings = config(tmp_path)
    Pretrainer(settings).train()
    trainer = Pretrainer(settings, resume=4)
    assert trainer.state.opt_step == 4
    trainer.train()
    assert losses(tmp_path / "run") == losses(whole)
    assert_same_weights(final_weights(tmp_path / "run"), final_weights(whole))
    with pytest.raises(UserError, match="5"):
        Pretrainer(settings, resume=5)


def test_out_of_time_saves_and_says_so(tmp_path):
    settings = config(tmp_path, max_time_sec=1e-6)
    assert Pretrainer(settings).train() == EXIT_OUT_OF_TIME
    assert CheckpointManager(tmp_path / "run").steps() == [0]
    settings.max_time_sec = 0.0
    assert Pretrainer(settings).train() == 0


def test_a_finished_run_is_left_alone(whole):
    before = {p: p.read_bytes() for p in whole.iterdir() if "step_" in p.name}
    saved = CheckpointManager(whole).load(None).meta["config"]
    settings = config(whole.parent)
    assert Pretrainer(settings).train() == 0
    assert {p: p.read_bytes() for p in whole.iterdir() if "step_" in p.name} == before
    assert saved["max_steps"] == 12


def test_the_run_folder_tells_the_whole_story(whole):
    record = yaml.safe_load((whole / "config.yaml").read_text())
    assert record["config"]["lr"] == 3e-3
    assert record["config"]["model_config"]["d_model"] == MODEL["d_model"]
    environment = json.loads((whole / "env.json").read_text())
    assert environment["torch"] == torch.__version__
    text = (whole / "train.log").read_text()
    assert "step=     12 | loss=" in text
    row = read_metrics(whole / "metrics.jsonl")[-1]
    assert {"loss", "ppl", "lr", "tps", "grad_norm", "peak_mem_gib", "tokens_seen"} <= row.keys()


def test_what_may_change_on_resume(tmp_path):
    """Free knobs take effect, batch geometry may change at equal tokens per step.

    The rest is refused with both values.
    """
    settings = config(tmp_path)
    stop_after(settings, 8)
    weights = final_weights(tmp_path / "run")
    for changes, words in (
        ({"model": {"d_model": 32}}, "model.d_model: 16 -> 32"),
        ({"seed": 1}, "training.seed: 0 -> 1"),
        ({"data_order": "sequential"}, "data.order: 'shuffled' -> 'sequential'"),
        ({"batch_size": 4}, "6 -> 8"),
    ):
        with pytest.raises(UserError, match="Cannot resume") as refusal:
            Pretrainer(config(tmp_path, **changes))
        assert words in str(refusal.value)
    other = write_tokens(tmp_path / "other.bin", 24 * 31 + 1, seed=5)
    with pytest.raises(UserError, match=r"other\.bin does not hold the data"):
        Pretrainer(config(tmp_path, data_path=other))
    assert_same_weights(final_weights(tmp_path / "run"), weights)

    changed = config(
        tmp_path, batch_size=2, gradient_accumulation_steps=3, lr=1e-3, max_steps=10,
        model={"chunk_size": 5, "ssd_dispatch": "pytorch"},
    )  # fmt: skip
    trainer = Pretrainer(changed)
    assert (trainer.state.opt_step, trainer.state.micro_step) == (4, 8)
    assert trainer.train() == 0
    rows = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert rows[-1]["opt_step"] == 10 and rows[-1]["samples_seen"] == 60
    assert rows[-1]["lr"] == pytest.approx(1e-3 * 0.05)
    # Windows of two up to micro_step 8, of three from there on; another restart loses no row.
    assert [r["micro_step"] for r in rows] == list(range(1, 8 + 3 * 6 + 1))
    Pretrainer(dataclasses.replace(changed, max_steps=11)).train()
    again = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert again[: len(rows)] == rows and len(again) == len(rows) + 3


def test_equal_tokens_with_another_geometry_give_the_same_losses(whole, tmp_path):
    stop_after(config(tmp_path), 8)
    Pretrainer(config(tmp_path, batch_size=6, gradient_accumulation_steps=1)).train()
    got = {r["opt_step"]: r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    want: dict[int, list[float]] = {}
    for step, loss, _ in losses(whole):
        want.setdefault((step + 1) // 2, []).append(loss)
    for opt_step in range(5, 13):
        assert got[opt_step] == pytest.approx(sum(want[opt_step]) / 2, abs=1e-5)


def kill_and_resume(folder: Path, kills: int, seed: int, checkpoint_format: str) -> list[str]:
    """Runs the command line in processes that are killed at random moments, then to the end.

    Returns what went wrong.
    """
    settings = config(folder, max_steps=150, save_every=3, log_every=2)
    body = dataclasses.asdict(settings)
    training = {
        "micro_batch_size": 3, "gradient_accumulation_steps": 2, "total_steps": 150,
        "warmup_steps": 3, "lr": 3e-3, "compile": False, "grad_checkpoint": False,
        "save_interval": 3, "log_interval": 2, "save_dir": body["checkpoint_dir"],
        "keep_last": 3, "tensorboard": False, "checkpoint_format": checkpoint_format,
    }  # fmt: skip
    data = {"train_data_path": body["data_path"], "order": "shuffled"}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL, "training": training, "data": data}))
    command = [sys.executable, "-m", "mamba3_lite.cli", "pretrain", "--config", str(path)]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    moments, problems, run = random.Random(seed), [], Path(body["checkpoint_dir"])
    for _ in range(kills):
        before = newest(run)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            match = re.match(r"resumed from .* at opt_step (\d+),", line)
            # A save that the kill caught while its files were being renamed is completed.
            if match and int(match[1]) < before:
                problems.append(f"saved {before}, but: {line.strip()}")
            if line.startswith("step="):
                break
        time.sleep(moments.uniform(0, 0.35))
        seen = newest(run)
        process.kill()
        process.wait()
        process.stdout.close()
        if newest(run) < seen:
            problems.append(f"step {seen} was saved and is gone")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        problems.append(done.stderr)
    return problems


def newest(run: Path) -> int:
    """The newest step whose meta file, the last to be written, is there; 0 without any."""
    steps = [int(p.stem.rpartition("_")[2]) for p in run.glob("meta_step_*.json")]
    return max(steps, default=0)


@pytest.mark.parametrize("checkpoint_format", ["files", "sharded"])
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.campaign)])
def test_kills_at_random_moments_lose_nothing(tmp_path, kills, checkpoint_format):
    """SIGKILL during training and saving, each followed by a resume.

    The final weights are bit for bit those of the quiet run.
    """
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    quiet.mkdir()
    killed.mkdir()
    assert kill_and_resume(quiet, 0, 0, "files") == []
    assert kill_and_resume(killed, kills, kills, checkpoint_format) == []
    assert_same_weights(final_weights(killed / "run"), final_weights(quiet / "run"))
    assert losses(killed / "run") == losses(quiet / "run")
    leftovers = [p.name for p in (killed / "run").iterdir() if "tmp" in p.name]
    assert leftovers == []


# case B09 (the manager's own part is in test_checkpoint.py)
@pytest.mark.parametrize("saved_compiled", [False, True])
@pytest.mark.parametrize("loaded_compiled", [False, True])
def test_acc9_b09_the_model_round_trips_compiled_and_plain(
    tmp_path, saved_compiled, loaded_compiled
):
    """Same names either way, a strict load, equal logits to the bit, a tied head, a complex A."""
    source, target = Mamba3Transformer(MODEL), Mamba3Transformer(MODEL)
    ids = torch.arange(40)[None] % 97
    with torch.no_grad():
        source.layers[0].A.copy_(torch.tensor([-2.0 + 0.7j, -0.3 - 3.0j]))
        want = source(ids)
    for model, compiled in ((source, saved_compiled), (target, loaded_compiled)):
        if compiled:
            compile_blocks(model, "default")
    CheckpointManager(tmp_path).save(1, source.state_dict(), {}, {})
    loaded = CheckpointManager(tmp_path).load(1).model
    load_weights(target, loaded)
    assert target.lm_head.weight is target.embed.weight
    assert torch.equal(target.layers[0].A, source.layers[0].A)
    plain = Mamba3Transformer(MODEL)
    load_weights(plain, target.state_dict())
    assert torch.equal(plain(ids), want)
    renamed = {**loaded, "layers.0.B": loaded["layers.0.A"]}
    missing = {name: value for name, value in loaded.items() if name != "layers.1.A"}
    for broken in (renamed, missing):
        with pytest.raises(UserError, match=r"layers\.0\.B|layers\.1\.A"):
            load_weights(plain, broken)


def test_a_signal_during_validation_ends_it_and_saves(tmp_path):
    """A long validation does not keep a preempted job alive, and costs the run nothing."""

    class SignalledDataset(torch.utils.data.Dataset):
        def __init__(self, inner):
            self.inner, self.read = inner, 0

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, index):
            self.read += 1
            if self.read == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return self.inner[index]

    val = write_tokens(tmp_path / "val.bin", 24 * 60 + 1, seed=3)
    settings = config(tmp_path, val_data_path=val, eval_interval=2)
    trainer = Pretrainer(settings)
    trainer.val_dataset = SignalledDataset(trainer.val_dataset)
    assert trainer.train() == 143
    assert trainer.val_dataset.read == 6, "two micro-batches of three, then no more"
    assert CheckpointManager(tmp_path / "run").steps() == [2]
    assert Pretrainer(settings).train() == 0
    assert losses(tmp_path / "run")[-1][0] == 24
