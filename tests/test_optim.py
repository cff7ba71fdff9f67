"""Fused AdamW: complex parameters as real views, groups, the divisor and the skipped step."""

import copy

import pytest
import torch
from torch import nn

from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.optim import (
    PlainView,
    build_optimizer,
    gradient_norm,
    load_optimizer,
    update,
)
from mamba3_lite.training.pretrain import TrainingConfig
from tests.runs import MODEL


class Small(nn.Module):
    """A matrix, a vector, a complex vector, and the matrix once more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))
        self.norm = nn.Parameter(torch.randn(5))
        self.A = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.tied = self.weight


def with_gradients(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = factor * torch.randn(p.shape, dtype=p.dtype, generator=generator)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone() for t in [*model.parameters(), *moments]]


ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def test_updates_are_those_of_plain_adamw_over_complex_numbers():
    """Divided gradients, a skipped step among them, weight decay on matrices only."""
    config = TrainingConfig(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.9)
    ours, theirs = Small(), None
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, config)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "weight_decay": 0.3},
            {"params": [theirs.norm, theirs.A], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.8, 0.9), foreach=False,
    )  # fmt: skip
    for i in range(8):
        bad = i in (0, 4)
        with_gradients(ours, i, factor=float("nan") if bad else 8.0)
        update(optimizer, divisor=torch.tensor(8.0), skip=ONE if bad else ZERO)
        if not bad:
            with_gradients(theirs, i)
            reference.step()
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)
    assert float((ours.A - theirs.A).detach().abs().max()) < 1e-6
    assert {float(s["step"]) for s in optimizer.state.values()} == {6.0}
    assert not torch.allclose(ours.A, Small().A)


def test_a_skipped_step_changes_nothing_at_all():
    model = Small()
    optimizer = build_optimizer(model, TrainingConfig())
    with_gradients(model, 0)
    update(optimizer, divisor=ONE, skip=ZERO)
    before = tensors(model, optimizer)
    with_gradients(model, 1, factor=float("inf"))
    update(optimizer, divisor=torch.tensor(float("nan")), skip=ONE)
    after = tensors(model, optimizer)
    assert len(after) == 3 + 3 * 3
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    update(optimizer, divisor=ONE, skip=ZERO)
    assert not torch.equal(model.A, before[2])


def test_another_optimizer_is_divided_and_skipped_as_well():
    model = Small()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with_gradients(model, 0, factor=4.0)
    update(optimizer, divisor=torch.tensor(4.0), skip=ONE)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    update(optimizer, divisor=torch.tensor(4.0), skip=ZERO)
    with_gradients(model, 0)
    for old, p in zip(before, model.parameters(), strict=True):
        assert torch.allclose(p, old - 0.5 * p.grad, atol=1e-6)


def test_a_complex_parameter_and_its_view_are_one():
    model = Small()
    optimizer = build_optimizer(model, TrainingConfig())
    (view,) = [p for p in optimizer.param_groups[1]["params"] if isinstance(p, PlainView)]
    assert view.shape == (3, 2) and view.grad is None
    with torch.no_grad():
        model.A.fill_(-2 + 3j)
    assert view.detach().tolist() == [[-2.0, 3.0]] * 3
    with_gradients(model, 0)
    assert view.grad.data_ptr() == model.A.grad.data_ptr()
    theirs = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(gradient_norm(optimizer)) == pytest.approx(float(theirs), rel=1e-6)
    optimizer.zero_grad()
    assert model.A.grad is None and model.weight.grad is None


def test_a_model_moved_under_its_optimizer_is_noticed():
    model = Small()
    optimizer = build_optimizer(model, TrainingConfig())
    with_gradients(model, 0)
    model.A.data = model.A.data.clone()
    with pytest.raises(AssertionError, match="moved"):
        update(optimizer, divisor=ONE, skip=ZERO)


def test_moments_survive_a_checkpoint_and_knobs_follow_the_configuration():
    models = [Mamba3Transformer(MODEL) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    configs = [TrainingConfig(lr=lr, weight_decay=lr) for lr in (1e-2, 1e-3)]
    first, second = (build_optimizer(m, c) for m, c in zip(models, configs, strict=True))
    with_gradients(models[0], 0)
    update(first, divisor=ONE, skip=ZERO)
    models[1].load_state_dict(models[0].state_dict())
    saved = copy.deepcopy(first.state_dict())
    load_optimizer(second, saved, configs[1])
    assert [g["lr"] for g in second.param_groups] == [1e-3] * 2
    assert [g["weight_decay"] for g in second.param_groups] == [1e-3, 0.0]
    load_optimizer(second, saved, configs[0])
    for model, optimizer in zip(models, (first, second), strict=True):
        with_gradients(model, 1)
        update(optimizer, divisor=ONE, skip=ZERO)
    got, want = tensors(models[1], second), tensors(models[0], first)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
