"""One micro-step and one accumulation window: weighting, clipping, schedule, guard."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.guard import AccumulationWindow, SpikeAlarm, Verdict
from mamba3_lite.training.losses import IGNORE_INDEX, head_loss, next_token_loss
from mamba3_lite.training.optim import build_optimizer, gradient_norm
from mamba3_lite.training.pretrain import TrainConfig, TrainingConfig, train_step
from mamba3_lite.training.schedule import build_schedule, lr_factor
from mamba3_lite.training.step import settle
from tests.runs import MODEL, VOCAB, tokens


def setup(dtype=torch.float32, **changes):
    fields = dict(max_steps=300, warmup_steps=5, lr=3e-4, gradient_accumulation_steps=1)
    config = TrainingConfig(**{**fields, **changes})
    torch.manual_seed(0)
    model = Mamba3Transformer(MODEL).to("cpu")
    model = model.double() if dtype == torch.float64 else model
    optimizer = build_optimizer(model, config)
    return model, optimizer, build_schedule(optimizer, config), config


def rows(n: int, seed: int = 0, length: int = 24):
    """n windows of (tokens, targets)."""
    window = tokens(n * length + 1, seed)
    return window[:-1].view(n, length), window[1:].view(n, length)


def run(parts, batches, log=lambda line: None, micro_step=0, opt_steps=0):
    """Feeds micro-batches through train_step; returns their metrics and the optimizer steps."""
    model, optimizer, scheduler, config = parts
    seen = []
    for x, y in batches:
        metrics, opt_steps = train_step(
            model, optimizer, scheduler, config, contextlib.nullcontext(), log,
            opt_steps, x, y, micro_step,
        )  # fmt: skip
        seen.append(metrics)
        micro_step += 1
    return seen, opt_steps


def state_of(parts):
    model, optimizer, scheduler, _ = parts
    moments = [v for s in optimizer.state.values() for v in s.values()]
    tensors = [*model.parameters(), *moments]
    return [t.detach().clone() for t in tensors], scheduler.state_dict()["last_epoch"]


def unchanged(parts, before) -> bool:
    now = state_of(parts)
    return now[1] == before[1] and all(
        torch.equal(a, b) for a, b in zip(now[0], before[0], strict=True)
    )


def test_train_step_on_tiny_model():
    parts = setup(gradient_accumulation_steps=2, lr=3e-3)
    x, y = rows(4)
    before = [p.detach().clone() for p in parts[0].parameters()]
    metrics, opt_steps = run(parts, [(x, y)])
    assert opt_steps == 0 and "grad_norm" not in metrics[0]
    assert all(torch.equal(a, b) for a, b in zip(before, parts[0].parameters(), strict=True))
    first = float(metrics[0]["loss"])
    metrics, opt_steps = run(parts, [(x, y)] * 79, micro_step=1)
    assert opt_steps == 40
    assert float(metrics[-1]["loss"]) < first - 0.5
    assert TrainConfig is TrainingConfig


# case B01
@pytest.mark.parametrize("cut", [[8], [2, 2, 2, 2], [1, 3, 4]])
def test_acc5_b01_accumulation_equals_the_big_batch(cut):
    """Unequal numbers of counted tokens; one micro-batch counts none."""
    x, y = rows(8)
    y = y.clone()
    y[0, 5:] = IGNORE_INDEX
    y[2:4] = IGNORE_INDEX
    y[6, ::2] = IGNORE_INDEX
    parts = setup(torch.float64, gradient_accumulation_steps=len(cut), max_grad_norm=1e9)
    batches = list(zip(x.split(cut), y.split(cut), strict=True))
    grads = {}
    parts[1].register_step_pre_hook(
        lambda optimizer, *_: grads.update(
            {n: p.grad / optimizer.grad_scale for n, p in parts[0].named_parameters()}
        )
    )
    metrics, opt_steps = run(parts, batches)
    assert opt_steps == 1
    reference = setup(torch.float64)[0]
    want = F.cross_entropy(reference(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE_INDEX)
    want.backward()
    for name, parameter in reference.named_parameters():
        error = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
        assert float(error) < 1e-6, name
    counted = [m for m in metrics if m is not None]
    want = want.detach()
    logged = sum(float(m["loss_sum"]) for m in counted) / sum(int(m["tokens"]) for m in counted)
    assert logged == pytest.approx(float(want), rel=1e-6)


def test_accumulation_1_2_4_gives_one_loss_curve_in_float64():
    """Equal tokens per optimizer step, 200 of them: losses to 1e-6, learning rates exactly."""
    curves, rates = [], []
    for accumulation in (1, 2, 4):
        parts = setup(torch.float64, gradient_accumulation_steps=accumulation)
        curve, trace, micro_step, opt_steps = [], [], 0, 0
        for opt_step in range(200):
            x, y = rows(4, seed=opt_step % 7)
            size = 4 // accumulation
            batches = list(zip(x.split(size), y.split(size), strict=True))
            metrics, opt_steps = run(parts, batches, micro_step=micro_step, opt_steps=opt_steps)
            micro_step += accumulation
            curve.append(sum(float(m["loss_sum"]) for m in metrics) / y.numel())
            trace.append(metrics[-1]["lr"])
        curves.append(torch.tensor(curve))
        rates.append(trace)
    assert rates[0] == rates[1] == rates[2]
    assert float((curves[1] - curves[0]).abs().max()) < 1e-6
    assert float((curves[2] - curves[0]).abs().max()) < 1e-6
    assert float(curves[0][-1]) < float(curves[0][0]) - 0.3


def test_accumulation_1_2_4_agrees_in_float32():
    curves = []
    for accumulation in (1, 2, 4):
        parts = setup(gradient_accumulation_steps=accumulation)
        curve, micro_step, opt_steps = [], 0, 0
        for opt_step in range(20):
            x, y = rows(4, seed=opt_step)
            size = 4 // accumulation
            batches = list(zip(x.split(size), y.split(size), strict=True))
            metrics, opt_steps = run(parts, batches, micro_step=micro_step, opt_steps=opt_steps)
            micro_step += accumulation
            curve.append(sum(float(m["loss_sum"]) for m in metrics) / y.numel())
        curves.append(torch.tensor(curve))
    assert float((curves[1] - curves[0]).abs().max()) < 1e-5
    assert float((curves[2] - curves[0]).abs().max()) < 1e-5


# case B02 (the resumed trace is in test_resume.py)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_acc6_b02_schedule_advances_once_an_optimizer_step(accumulation):
    shape = {"warmup_steps": 4, "max_steps": 12, "min_lr_ratio": 0.05}
    parts = setup(gradient_accumulation_steps=accumulation, **shape)
    x, y = rows(1)
    metrics, opt_steps = run(parts, [(x, y)] * (12 * accumulation))
    assert opt_steps == 12
    rates = [m["lr"] for m in metrics[accumulation - 1 :: accumulation]]
    assert rates == [3e-4 * lr_factor(s, **shape) for s in range(1, 13)]
    assert rates[3] == 3e-4 and rates[-1] == pytest.approx(1.5e-5, rel=1e-12)


def test_schedule_is_the_closed_form_of_the_torch_schedulers():
    config = TrainingConfig(max_steps=50, warmup_steps=10, lr=3e-4, min_lr_ratio=0.05)
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr) for _ in range(2))
    mine = build_schedule(ours, config)
    warmup = LinearLR(theirs, start_factor=0.01, end_factor=1.0, total_iters=10)
    cosine = CosineAnnealingLR(theirs, T_max=40, eta_min=config.lr * 0.05)
    reference = SequentialLR(theirs, [warmup, cosine], milestones=[10])
    for _ in range(50):
        assert mine.get_last_lr()[0] == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        for optimizer, scheduler in ((ours, mine), (theirs, reference)):
            optimizer.step()
            scheduler.step()
    assert mine.get_last_lr()[0] == pytest.approx(1.5e-5, rel=1e-12)


# case B13
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_acc10_b13_non_finite_gradient_changes_nothing(bad, position):
    """A finite loss with a NaN or Inf gradient at any micro-step: the whole window goes.

    The next one is normal.
    """
    parts = setup(gradient_accumulation_steps=3)
    batches = [rows(2, seed=s) for s in range(3)]
    run(parts, batches)  # moments exist
    before, lines = state_of(parts), []
    weight = parts[0].layers[0].out_proj.weight
    for i, batch in enumerate(batches):
        hook = weight.register_hook(lambda g: torch.full_like(g, bad)) if i == position else None
        metrics, opt_steps = run(parts, [batch], lines.append, micro_step=3 + i, opt_steps=1)
        if hook is not None:
            hook.remove()
    assert opt_steps == 1 and metrics == [None]
    assert unchanged(parts, before)
    assert len(lines) == 1 and lines[0].startswith("[nan-guard] gradient norm")
    metrics, opt_steps = run(parts, batches, micro_step=6, opt_steps=1)
    assert opt_steps == 2 and not unchanged(parts, before)
    assert torch.isfinite(metrics[-1]["grad_norm"])


@pytest.mark.parametrize("late", [False, True])
def test_non_finite_loss_drops_the_window_and_its_other_micro_steps(late):
    parts = setup(gradient_accumulation_steps=3)
    run(parts, [rows(2, seed=s) for s in range(3)])
    AccumulationWindow.of(parts[1]).late = late
    before, lines = state_of(parts), []
    saved = parts[0].norm_f.weight.detach().clone()
    with torch.no_grad():
        parts[0].norm_f.weight.fill_(float("nan"))
    run(parts, [rows(2)], lines.append, micro_step=3, opt_steps=1)
    with torch.no_grad():
        parts[0].norm_f.weight.copy_(saved)
    metrics, opt_steps = run(parts, [rows(2)] * 2, lines.append, micro_step=4, opt_steps=1)
    assert opt_steps == 1 and unchanged(parts, before)
    if late:
        assert lines == [] and float(metrics[1]["skipped"]) == 1
        assert settle(parts[1], parts[2], lines.append, 1) == 1
    else:
        assert metrics[1] is None
    assert len(lines) == 1 and "loss nan at micro_step 5" in lines[0]


def test_a_late_outcome_is_read_when_the_next_window_closes(monkeypatch):
    """Not a micro-step earlier; the weights and learning rates are those of reading at once."""
    hidden, reads, seen = [float("nan"), 1.0, 1.0, float("nan"), 1.0], [], {}
    read = Verdict.read
    monkeypatch.setattr(Verdict, "read", lambda self: reads.append(1) or read(self))
    for late in (False, True):
        parts = setup(gradient_accumulation_steps=2, warmup_steps=5)
        AccumulationWindow.of(parts[1]).late = late
        rates, counts, lines, opt_steps = [], [], [], 0
        parts[1].register_step_pre_hook(
            lambda optimizer, *_, rates=rates: rates.append(optimizer.param_groups[0]["lr"])
        )
        for i, factor in enumerate(hidden):
            for j in range(2):
                reads.clear()
                hook = parts[0].norm_f.register_forward_hook(lambda m, a, y, f=factor: y * f)
                _, opt_steps = run(
                    parts, [rows(2, seed=2 * i + j)], lines.append, 2 * i + j, opt_steps
                )
                hook.remove()
                assert len(reads) == (j == 1 and (i > 0 or not late))
            counts.append(opt_steps)
        opt_steps = settle(parts[1], parts[2], lines.append, opt_steps)
        assert settle(parts[1], parts[2], lines.append, opt_steps) == opt_steps == 3
        seen[late] = (rates, lines, state_of(parts))
        assert counts == ([0, 0, 1, 2, 2] if late else [0, 1, 2, 2, 3])
    at_once, one_late = seen[False], seen[True]
    assert one_late[:2] == at_once[:2] and len(at_once[1]) == 2
    shape = {"warmup_steps": 5, "max_steps": 300, "min_lr_ratio": 0.05}
    assert at_once[0] == [3e-4 * lr_factor(s, **shape) for s in (0, 0, 1, 2, 2)]
    assert one_late[2][1] == at_once[2][1] == 3
    assert all(torch.equal(a, b) for a, b in zip(one_late[2][0], at_once[2][0], strict=True))


class HostReads(TorchDispatchMode):
    """Counts the operators through which a value leaves the device, where the host would wait."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_late_train_step_reads_nothing_back():
    """Masked targets, clipping and a NaN window included; only the verdict is read, and late."""
    parts = setup(gradient_accumulation_steps=2, max_grad_norm=0.01)
    AccumulationWindow.of(parts[1]).late = True
    batches = [rows(2, seed=s) for s in range(6)]
    x, y = batches[2]
    batches[2] = (x, torch.where(x % 3 == 0, IGNORE_INDEX, y))
    run(parts, batches[:2])  # moments are made
    with HostReads() as reads:
        _, opt_steps = run(parts, batches[2:4], micro_step=2)
        hook = parts[0].norm_f.register_forward_hook(lambda m, a, y: y * float("nan"))
        _, opt_steps = run(parts, batches[4:], micro_step=4, opt_steps=opt_steps)
        hook.remove()
        assert reads.seen == [] and opt_steps == 2
        assert bool(torch.ones(())) and reads.seen, "the watcher is awake"


def test_without_the_guard_a_nan_goes_through():
    parts = setup(nan_guard=False)
    parts[0].layers[0].out_proj.weight.register_hook(lambda g: g * float("nan"))
    _, opt_steps = run(parts, [rows(2)])
    assert opt_steps == 1 and not bool(torch.isfinite(parts[0].embed.weight).all())


def test_clipping_acts_once_on_the_accumulated_gradient():
    norms = {}
    for limit in (1e9, 0.01):
        parts = setup(gradient_accumulation_steps=2, max_grad_norm=limit)
        seen = {}
        parts[1].register_step_pre_hook(
            lambda optimizer, *_, s=seen: s.update(
                norm=float(gradient_norm(optimizer) / optimizer.grad_scale)
            )
        )
        metrics, _ = run(parts, [rows(2, seed=s) for s in range(2)])
        norms[limit] = (float(metrics[-1]["grad_norm"]), seen["norm"])
    assert norms[1e9][0] == pytest.approx(norms[0.01][0], rel=1e-5)
    assert norms[1e9][1] == pytest.approx(norms[1e9][0], rel=1e-4)
    assert norms[0.01][1] == pytest.approx(0.01, rel=1e-3)
    theirs = torch.nn.utils.get_total_norm([p.grad for p in parts[0].parameters()])
    assert float(gradient_norm(parts[1])) == pytest.approx(float(theirs), rel=1e-6)


# case A18
def test_a18_no_ssm_scalar_decays():
    model, optimizer, _, config = setup()
    decay, rest = optimizer.param_groups
    assert decay["weight_decay"] == config.weight_decay and rest["weight_decay"] == 0
    held = [{p.data_ptr() for p in group["params"]} for group in (decay, rest)]
    matrices = {p.data_ptr() for p in model.parameters() if p.dim() >= 2}
    assert held[0] == matrices
    assert held[1] == {p.data_ptr() for p in model.parameters()} - matrices
    assert {layer.A.data_ptr() for layer in model.layers} <= held[1]
    counted = len(decay["params"]) + len(rest["params"])
    assert counted == len({id(p) for p in model.parameters()})


# case B19
def test_b19_head_loss_in_pieces_equals_the_plain_one(monkeypatch):
    monkeypatch.setattr("mamba3_lite.training.losses._PIECE_ELEMENTS", 7 * VOCAB)
    torch.manual_seed(1)
    hidden = torch.randn(5, 9, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCAB, (5, 9))
    targets[1, 3:] = IGNORE_INDEX
    logits = (hidden @ weight.T).flatten(0, 1)
    got = head_loss(hidden, weight, targets)
    want = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    assert float(got.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(3 * got, (hidden, weight)),
        torch.autograd.grad(3 * want, (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_any_module_from_ids_to_logits_can_be_trained():
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
    x, y = rows(2)
    loss, count = next_token_loss(model, x, y)
    assert int(count) == 48 and float(loss.detach()) == pytest.approx(48 * 4.6, rel=0.1)


def test_spike_alarm_notices_a_jump_and_nothing_else():
    alarm = SpikeAlarm()
    generator = torch.Generator().manual_seed(0)
    for i in range(300):
        noise = 0.05 * float(torch.randn(1, generator=generator))
        assert alarm.check(9 - 6 * i / 300 + noise) is None
    assert "above the recent median" in alarm.check(6.0)
