"""The learning rate as a function of the optimizer step: linear warm-up, then cosine to a floor."""

import math
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from mamba3_lite.training.config import TrainingConfig

_WARMUP_START = 0.01


def lr_factor(opt_step: int, *, warmup_steps: int, max_steps: int, min_lr_ratio: float) -> float:
    """lr(opt_step) / lr: 0.01 to 1 over ``warmup_steps``, then cosine to ``min_lr_ratio``.

    The floor is reached at ``max_steps`` and holds beyond. The closed form of LinearLR(0.01 -> 1),
    CosineAnnealingLR(max_steps - warmup_steps) in a SequentialLR; being a function of the step
    alone, it cannot drift and a resumed run cannot differ.
    """
    if opt_step < warmup_steps:
        return _WARMUP_START + (1 - _WARMUP_START) * opt_step / warmup_steps
    progress = min(1.0, (opt_step - warmup_steps) / max(1, max_steps - warmup_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def build_schedule(optimizer: Optimizer, config: "TrainingConfig") -> LambdaLR:
    """A scheduler whose ``step()`` is called once per optimizer step."""

    def factor(opt_step: int) -> float:
        return lr_factor(
            opt_step,
            warmup_steps=config.warmup_steps,
            max_steps=config.max_steps,
            min_lr_ratio=config.min_lr_ratio,
        )

    return LambdaLR(optimizer, factor)


def resume_schedule(scheduler: LambdaLR, opt_step: int) -> None:
    """Puts a schedule where it stands after ``opt_step`` optimizer steps, all the state it has."""
    scheduler.last_epoch = opt_step
    scheduler._step_count = opt_step + 1
    rates = [
        base * factor(opt_step)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
