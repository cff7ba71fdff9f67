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
from tests.runs import (
    StoppingPretrainer,
    assert_same_weights,
    config,
    final_weights,
    losses,
    write_tokens,
)


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


def poisoned(settings, windows, **how) -> PoisonedPretrainer:
    trainer = PoisonedPretrainer(settings, **how)
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


def whole_run(folder, bad, late, **changes) -> dict:
    """All that a run leaves behind, and what its optimizer was given."""
    folder.mkdir()
    data = write_tokens(folder / "long.bin", 24 * 100 + 1)
    how = {"data_path": data, "data_order": "sequential", "log_every": 1000}
    settings = config(folder, **{**how, **changes})
    trainer, rates, waited = poisoned(settings, bad, late_guard=late), [], []
    trainer.optimizer.register_step_pre_hook(
        lambda o, *_: rates.append((o.param_groups[0]["lr"], float(o.found_inf)))
    )
    micro_step = trainer._micro_step
    trainer._micro_step = lambda *b: (
        waited.append(trainer._window.verdict is not None),
        micro_step(*b),
    )
    assert trainer.train() == 0
    checkpoint = CheckpointManager(folder / "run").load(None)
    told = [(e["event"], e["opt_step"], e["micro_step"]) for e in events(folder / "run")]
    return {
        "model": checkpoint.model,
        "moments": checkpoint.training["optimizer"]["state"],
        "state": checkpoint.meta["state"],
        "steps": CheckpointManager(folder / "run").steps(),
        "events": told,
        "rows": losses(folder / "run"),
        "rates": rates,
        "waited": sum(waited),
    }


def assert_same_run(late: dict, at_once: dict) -> None:
    """Bit for bit, although one of them has gone on without knowing."""
    assert late["waited"] > 0 and at_once["waited"] == 0
    assert_same_weights(late["model"], at_once["model"])
    assert late["moments"].keys() == at_once["moments"].keys()
    for number, moments in at_once["moments"].items():
        assert moments.keys() == late["moments"][number].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(late["moments"][number][k], v) for k, v in moments.items())
    for what in ("state", "steps", "events", "rows"):
        assert late[what] == at_once[what], what


def test_a_dropped_window_stays_out_of_the_logged_mean(tmp_path):
    """Its good micro-steps too: the row of two windows is the mean of the one that counted."""
    rows = {}
    for log_every in (1, 4):
        folder = tmp_path / str(log_every)
        folder.mkdir()
        settings = config(folder, data_order="sequential", max_steps=4, log_every=log_every)
        poisoned(settings, {9}, late_guard=True).train()
        rows[log_every] = [loss for _, loss, _ in losses(folder / "run")]
    assert rows[4][0] == pytest.approx((rows[1][0] + rows[1][1]) / 2, rel=1e-12)
    assert rows[1][2] != pytest.approx(rows[4][0], rel=1e-5)
    assert rows[1][3] is None, "no token counted in the second half of that window"


# Six samples a window, three a micro-step; saved at optimizer steps 4, 8 and 12.
@pytest.mark.parametrize(
    ("bad", "dropped"),
    [
        (range(0), 0),
        ({0}, 1),  # the first window
        ({9, 10, 15}, 2),  # two in a row
        ({8}, 1),  # the first micro-step of a window only
        ({9}, 1),  # the second only
        ({18, 24}, 2),  # where a save is due
        (range(54, 66), 2),  # at the end of the run
    ],
)
@pytest.mark.parametrize("log_every", [5, 1000])
def test_learning_of_a_dropped_window_late_changes_nothing(tmp_path, bad, dropped, log_every):
    how = {"max_steps": 10, "log_every": log_every}
    late, at_once = (whole_run(tmp_path / str(x), bad, x, **how) for x in (True, False))
    assert_same_run(late, at_once)
    assert late["state"]["dropped_windows"] == dropped
    assert late["rates"] == at_once["rates"]
    assert sum(skipped for _, skipped in late["rates"]) == dropped
    assert len(late["rates"]) == 10 + dropped


@pytest.mark.parametrize(
    ("bad", "span"),
    [(range(30, 42), (30, 42)), (range(12, 31), (12, 24)), (range(36, 48), (36, 48))],
)
def test_a_late_rollback_restores_and_skips_the_same(tmp_path, bad, span):
    """It comes while the window behind the bad ones is under way, whose update is undone."""
    how = {"nan_guard_max_consecutive": 2, "max_rollbacks": 9, "save_every": 2, "max_steps": 11}
    late, at_once = (whole_run(tmp_path / str(x), bad, x, **how) for x in (True, False))
    assert_same_run(late, at_once)
    assert tuple(late["state"]["skip_spans"][0]) == span
    assert [e[0] for e in late["events"][:3]] == ["nan-guard", "nan-guard", "rollback"]


@pytest.mark.parametrize("micro_steps", range(1, 12))
def test_a_stop_with_an_outcome_under_way_is_exact(tmp_path, micro_steps):
    """In and between windows, right behind bad ones and good ones: saved, resumed, the same run."""

    class Stopping(PoisonedPretrainer, StoppingPretrainer):
        pass

    bad, runs = {6, 14, 20}, {}
    for stop in (None, micro_steps):
        folder = tmp_path / str(stop)
        folder.mkdir()
        data = write_tokens(folder / "long.bin", 24 * 100 + 1)
        how = {"data_path": data, "data_order": "sequential", "log_every": 3, "save_every": 3}
        settings = config(folder, max_steps=7, **how)
        trainer = Stopping(settings, late_guard=True)
        trainer.bad_windows, trainer.stop_at = frozenset(bad), stop or 0
        assert trainer.train() == (143 if stop else 0)
        if stop:
            assert poisoned(settings, bad, late_guard=True).train() == 0
        checkpoint = CheckpointManager(folder / "run").load(None)
        told = [(e["event"], e["opt_step"], e["micro_step"]) for e in events(folder / "run")]
        runs[stop] = (checkpoint.meta["state"], losses(folder / "run"), told, checkpoint.model)
    assert runs[micro_steps][:3] == runs[None][:3]
    assert len(runs[None][2]) == 3
    assert_same_weights(runs[micro_steps][3], runs[None][3])


def test_a_late_run_gives_up_as_well(tmp_path):
    trainer = poisoned(
        config(tmp_path, nan_guard_max_consecutive=3, log_every=1000), range(31), late_guard=True
    )
    with pytest.raises(RuntimeError, match="3 windows in a row .* no checkpoint"):
        trainer.train()
    assert trainer.state.dropped_windows == 3 and trainer.state.opt_step == 0


@pytest.mark.gpu
def test_the_loop_never_waits_for_the_device(tmp_path, monkeypatch):
    """No synchronising call between the micro-steps of a row, forward pass and update included."""
    trainer = Pretrainer(config(tmp_path, max_steps=40, log_every=1000, save_every=1000))
    micro_step, seen = trainer._micro_step, []

    def watched(*batch):
        seen.append(trainer._window.verdict is not None)
        if len(seen) > 4:  # kernels are loaded and moments made on the first ones
            torch.cuda.set_sync_debug_mode("error")
        micro_step(*batch)
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(trainer, "_micro_step", watched)
    assert trainer.train() == 0
    assert len(seen) == 80 and sum(seen) > 70


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
