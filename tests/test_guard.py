"""Bad batches in a whole run: dropped windows, rollback, skipped spans, and giving up."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from mamba3_lite.data.loader import next_sample
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.utils.checkpoint import CheckpointManager
from mamba3_lite.utils.logging import read_metrics
from tests.runs import assert_same_weights, config, final_weights, losses


class PoisonedPretrainer(Pretrainer):
    """A run in which certain windows of the stream give a NaN loss, whenever they come up."""

    bad_windows: frozenset[int] = frozenset()

    def _micro_step(self, tokens: Tensor, targets: Tensor) -> None:
        first = next_sample(self.state.samples_seen, self.state.skip_spans)
        windows = {self.order.window(first + i) for i in range(tokens.shape[0])}
        hook = None
        if windows & self.bad_windows:
            hook = self.model.norm_f.register_forward_hook(lambda m, i, out: out * math.nan)
        super()._micro_step(tokens, targets)
        if hook is not None:
            hook.remove()


def poisoned(settings, windows) -> PoisonedPretrainer:
    trainer = PoisonedPretrainer(settings)
    trainer.bad_windows = frozenset(windows)
    return trainer


def events(folder) -> list[dict]:
    return [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "event"]


def test_one_bad_batch_costs_one_window(tmp_path):
    trainer = poisoned(config(tmp_path, data_order="sequential", max_steps=4), {7})
    assert trainer.train() == 0
    assert trainer.state.opt_step == 4
    assert trainer.state.samples_seen == 5 * 6 and trainer.state.dropped_windows == 1
    assert trainer.state.tokens_seen == 4 * 6 * 24
    assert [e["event"] for e in events(tmp_path / "run")] == ["nan-guard"]
    assert all(bool(torch.isfinite(w).all()) for w in final_weights(tmp_path / "run").values())


def test_the_run_after_a_dropped_window_is_the_run_without_it(tmp_path):
    """Dropping samples 6..11 equals never having had them: same weights, bit for bit."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    settings = config(tmp_path / "a", data_order="sequential", max_steps=4)
    poisoned(settings, {7}).train()
    clean = Pretrainer(config(tmp_path / "b", data_order="sequential", max_steps=4))
    clean.state.skip_spans.append((6, 12))
    clean.train()
    got, want = (final_weights(tmp_path / name / "run") for name in ("a", "b"))
    assert_same_weights(got, want)


# case B12
def test_b12_rollback_restores_everything_skips_the_span_and_goes_on(tmp_path):
    """Two windows in a row are bad: back to the checkpoint, over the span, and on to the end."""
    settings = config(
        tmp_path, data_order="sequential", save_every=2, max_steps=6, nan_guard_max_consecutive=2
    )  # fmt: skip
    trainer = poisoned(settings, set(range(18, 30)))
    assert trainer.train() == 0
    assert trainer.state.opt_step == 6 and trainer.state.skip_spans == [(18, 30)]
    assert trainer.state.samples_seen == 6 * 6 + 12 and trainer.state.dropped_windows == 2
    told = [e["event"] for e in events(tmp_path / "run")]
    assert told == ["nan-guard", "nan-guard", "rollback"]
    steps = [step for step, _, _ in losses(tmp_path / "run")]
    assert steps == sorted(set(steps)), "no micro-step is logged twice"

    other = tmp_path / "clean"
    other.mkdir()
    clean = Pretrainer(config(other, data_order="sequential", save_every=2, max_steps=6))
    clean.state.skip_spans.append((18, 30))
    clean.train()
    assert_same_weights(final_weights(tmp_path / "run"), final_weights(other / "run"))


def test_b12_a_second_rollback_remembers_the_first(tmp_path):
    """Bad, good, bad between two saves: each span is skipped once, and the run goes on."""
    settings = config(
        tmp_path, data_order="sequential", save_every=4, max_steps=3, nan_guard_max_consecutive=1,
        warmup_steps=1, batch_size=1,
    )  # fmt: skip
    Pretrainer(dataclasses.replace(settings, max_steps=2)).train()
    trainer = poisoned(settings, {5, 9})
    trainer.config.max_steps = 8
    assert trainer.train() == 0
    assert trainer.state.skip_spans == [(4, 6), (8, 10)]
    assert trainer.state.samples_seen == 8 * 2 + 4
    assert trainer.state.tokens_seen == 8 * 2 * 24


def test_b12_skipped_spans_survive_a_restart(tmp_path):
    settings = config(
        tmp_path, data_order="sequential", save_every=2, max_steps=6, nan_guard_max_consecutive=2
    )  # fmt: skip
    poisoned(settings, set(range(18, 30))).train()
    settings.max_steps = 9
    again = Pretrainer(settings)
    assert again.state.skip_spans == [(18, 30)]
    assert again.train() == 0
    assert again.state.samples_seen == 9 * 6 + 12


def test_b12_retries_are_bounded(tmp_path):
    settings = config(
        tmp_path, save_every=2, nan_guard_max_consecutive=2, max_rollbacks=2, max_steps=40,
        warmup_steps=1,
    )  # fmt: skip
    Pretrainer(config(tmp_path, save_every=2, max_steps=2, warmup_steps=1)).train()
    trainer = poisoned(settings, range(31))
    with pytest.raises(RuntimeError, match="after 2 rollbacks: giving up"):
        trainer.train()
    checkpoint = CheckpointManager(tmp_path / "run").load(None)
    assert checkpoint.opt_step == 2
    assert all(bool(torch.isfinite(w).all()) for w in checkpoint.model.values())


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path):
    trainer = poisoned(config(tmp_path, nan_guard_max_consecutive=3), range(31))
    with pytest.raises(RuntimeError, match="3 windows in a row .* no checkpoint"):
        trainer.train()
    assert trainer.state.dropped_windows == 3


def test_strikes_must_be_consecutive(tmp_path):
    """Every second window is bad: dropped each time, never a rollback."""
    bad = {w for w in range(31) if (w // 6) % 2}
    settings = config(
        tmp_path, data_order="sequential", nan_guard_max_consecutive=2, max_steps=3, warmup_steps=1
    )
    trainer = poisoned(settings, bad)
    assert trainer.train() == 0
    assert trainer.state.dropped_windows == 2 and trainer.state.rollbacks == 0


def test_a_failed_save_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    """ENOSPC in the middle costs that checkpoint only; at the end it is an error."""
    from mamba3_lite.errors import UserError
    from mamba3_lite.utils.checkpoint import CheckpointWriteError

    real = CheckpointManager.save

    def full(self, opt_step, *args):
        if opt_step in failing:
            raise CheckpointWriteError("no space left on device")
        real(self, opt_step, *args)

    monkeypatch.setattr(CheckpointManager, "save", full)
    failing = {8}
    assert Pretrainer(config(tmp_path)).train() == 0
    assert CheckpointManager(tmp_path / "run").steps() == [4, 12]
    assert [e["event"] for e in events(tmp_path / "run")] == ["save-failed"]
    other = tmp_path / "other"
    other.mkdir()
    failing = {12}
    with pytest.raises(UserError, match="last checkpoint could not be written"):
        Pretrainer(config(other)).train()
    assert CheckpointManager(other / "run").steps() == [4, 8]


def test_a_spike_is_told_and_training_goes_on(tmp_path):
    class Spiky(Pretrainer):
        def _micro_step(self, tokens, targets):
            # Finite nonsense, once the model has learnt something.
            if self.state.opt_step == 30:
                targets = (targets + 50) % 97
            super()._micro_step(tokens, targets)

    trainer = Spiky(config(tmp_path, max_steps=34, lr=2e-2, save_every=100))
    assert trainer.train() == 0
    told = events(tmp_path / "run")
    assert [e["event"] for e in told] == ["spike"] and told[0]["opt_step"] == 31
