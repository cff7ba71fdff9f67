"""The passes of a micro-step, recorded: here a recording runs the same code again.

tests/gpu/test_passes_gpu.py has the graphs.
"""

import contextlib
import dataclasses

import pytest
import torch

from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.training.guard import AccumulationWindow
from mamba3_lite.training.losses import IGNORE_INDEX
from mamba3_lite.training.passes import Recording, insist, recording_for
from mamba3_lite.training.pretrain import TrainingConfig, train_step
from tests.test_train_step import rows, setup


class Again:
    """Records by keeping the function, and replays into the tensors that a graph would write."""

    def __init__(self, model):
        self.parameters, self.recorded, self.replayed = list(model.parameters()), 0, 0

    def __call__(self, run):
        writes = all(p.grad is None for p in self.parameters)
        before = [p.grad if p.grad is None else p.grad.clone() for p in self.parameters]
        results = run()
        grads = [p.grad for p in self.parameters]
        if not writes:  # a recording has no effect
            for grad, old in zip(grads, before, strict=True):
                grad.copy_(old)
        self.recorded += 1

        def replay():
            self.replayed += 1
            if writes:
                assert all(p.grad is g for p, g in zip(self.parameters, grads, strict=True))
                for grad in grads:
                    grad.zero_()
            for own, new in zip(results, run(), strict=True):
                own.copy_(new)

        return replay, results


def trained(accumulation: int, *, recorded: bool, batches, **changes):
    parts = setup(gradient_accumulation_steps=accumulation, **changes)
    model, optimizer, scheduler, config = parts
    again = Again(model)
    if recorded:
        window = AccumulationWindow.of(optimizer)
        window.recording = Recording(model, contextlib.nullcontext(), record=again)
    seen, opt_steps = [], 0
    for micro_step, (x, y) in enumerate(batches):
        metrics, opt_steps = train_step(
            model, optimizer, scheduler, config, contextlib.nullcontext(), lambda line: None,
            opt_steps, x, y, micro_step,
        )  # fmt: skip
        seen.append(None if metrics is None else float(metrics["loss"]))
    weights = [p.detach().clone() for p in model.parameters()]
    return seen, opt_steps, weights, again


def batches(count: int, rows_each: int = 2):
    x, y = (t.clone() for t in rows(count * rows_each))
    return list(zip(x.split(rows_each), y.split(rows_each), strict=True))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_recorded_training_is_the_plain_one(accumulation):
    data = batches(9)
    data[4][1][:, :7] = IGNORE_INDEX
    want, steps, weights, _ = trained(accumulation, recorded=False, batches=data)
    got, got_steps, got_weights, again = trained(accumulation, recorded=True, batches=data)
    assert got == want and got_steps == steps == 9 // accumulation
    assert all(map(torch.equal, got_weights, weights))
    assert again.recorded == (1 if accumulation == 1 else 2) and again.replayed == 9


def test_a_dropped_window_leaves_nothing_behind():
    data = batches(6)
    want, _, weights, _ = trained(1, recorded=False, batches=data[:2] + data[3:])

    parts = setup(gradient_accumulation_steps=1)
    model, optimizer, scheduler, config = parts
    AccumulationWindow.of(optimizer).recording = Recording(
        model, contextlib.nullcontext(), record=Again(model)
    )
    opt_steps, seen = 0, []
    for micro_step, (x, y) in enumerate(data):
        amp = contextlib.nullcontext()
        if micro_step == 2:  # weights that give NaN for one micro-step, then what they were
            kept = model.norm_f.weight.detach().clone()
            model.norm_f.weight.data.fill_(float("nan"))
        metrics, opt_steps = train_step(
            model, optimizer, scheduler, config, amp, lambda line: None, opt_steps, x, y, micro_step
        )
        if micro_step == 2:
            assert metrics is None
            model.norm_f.weight.data.copy_(kept)
        else:
            seen.append(float(metrics["loss"]))
    assert seen == want and opt_steps == 5
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("good", [0, 1])
def test_what_cannot_be_recorded_runs_plainly(good, capsys):
    """The first graph, or only the one that adds to gradients."""
    data = batches(9)
    want, steps, weights, _ = trained(3, recorded=False, batches=data)
    parts = setup(gradient_accumulation_steps=3)
    model, optimizer, scheduler, config = parts
    again = Again(model)

    def record(run):
        if again.recorded == good:
            for parameter in model.parameters():  # as an interrupted backward pass may
                parameter.grad = torch.ones_like(parameter)
            try:
                raise RuntimeError("a copy to the host\nsecond line")
            finally:
                raise RuntimeError("the end of the recording failed too")
        return again(run)

    recording = Recording(model, contextlib.nullcontext(), record=record)
    AccumulationWindow.of(optimizer).recording = recording
    opt_steps, seen = 0, []
    for micro_step, (x, y) in enumerate(data):
        metrics, opt_steps = train_step(
            model, optimizer, scheduler, config, contextlib.nullcontext(), lambda line: None,
            opt_steps, x, y, micro_step,
        )  # fmt: skip
        seen.append(float(metrics["loss"]))
    assert (seen, opt_steps) == (want, steps) and recording.problem == "a copy to the host"
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    with pytest.raises(UserError, match="ran plainly .a copy to the host.: no result"):
        insist(recording)
    said = "[warn] micro-steps are not recorded, and run plainly: a copy to the host\n"
    assert capsys.readouterr().out == said and again.replayed == good


def test_another_shape_runs_plainly():
    data = batches(2) + batches(2, rows_each=1) + batches(2)
    want, _, weights, _ = trained(1, recorded=False, batches=data)
    got, _, got_weights, again = trained(1, recorded=True, batches=data)
    assert got == want and all(map(torch.equal, got_weights, weights))
    assert again.replayed == 4


def test_a_window_that_began_plainly_ends_plainly():
    """Its gradients are not the tensors that a graph adds to."""
    data = batches(4)
    shorter = [(data[0][0][:1], data[0][1][:1]), *data[1:]]
    want, _, weights, _ = trained(2, recorded=False, batches=shorter)
    parts = setup(gradient_accumulation_steps=2)
    model, optimizer, scheduler, config = parts
    recording = Recording(model, contextlib.nullcontext(), record=Again(model))
    recording(96, data[1])  # the shape that counts
    AccumulationWindow.of(optimizer).recording = recording
    opt_steps, seen = 0, []
    for micro_step, (x, y) in enumerate(shorter):
        window = AccumulationWindow.of(optimizer)
        metrics, opt_steps = train_step(
            model, optimizer, scheduler, config, contextlib.nullcontext(), lambda line: None,
            opt_steps, x, y, micro_step,
        )  # fmt: skip
        seen.append(float(metrics["loss"]))
    assert window.divisor == 96 and seen == want
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_what_is_recorded_where():
    model, _, _, config = setup()
    asked = TrainingConfig(compile_model=True, compile_mode="reduce-overhead")
    cpu = World(torch.device("cpu"))
    gpu, ranks = World(torch.device("cuda")), World(torch.device("cuda"), grouped=True)
    for settings, world in (
        (asked, cpu), (asked, ranks), (dataclasses.replace(asked, compile_mode="default"), gpu),
        (dataclasses.replace(asked, compile_model=False), gpu),
    ):  # fmt: skip
        assert recording_for(model, settings, contextlib.nullcontext(), world) is None
