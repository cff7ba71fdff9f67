"""One micro-step, and the optimizer step when it closes an accumulation window."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mamba3_lite.training.config import TrainingConfig
from mamba3_lite.training.guard import AccumulationWindow, Verdict
from mamba3_lite.training.optim import gradient_norm, update
from mamba3_lite.training.parallel import gradient_sync
from mamba3_lite.training.passes import forward_backward


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    config: TrainingConfig,
    amp_context: AbstractContextManager,
    log: Callable[[str], None],
    opt_steps: int,
    tokens: Tensor,
    targets: Tensor,
    micro_step: int,
    *,
    segment_ids: Tensor | None = None,
) -> tuple[dict[str, Any] | None, int]:
    """One micro-step, and the optimizer step when it closes an accumulation window.

    Gradients are those of the summed loss; they are divided by the number of counted tokens of the
    whole window when it closes, so every token weighs the same however the window is cut. A window
    with a non-finite loss or gradient norm changes nothing: the device itself skips the update.

    When the host learns of that is up to ``AccumulationWindow.of(optimizer).late``. False, the
    default: at once, which on a GPU waits for the device. True: when the next window closes, just
    before its own update, so the learning rate is right and the device has work meanwhile; until
    then an update is not counted, and :func:`settle` counts the last one.

    Args:
        model: one that :func:`mamba3_lite.training.losses.next_token_loss` takes.
        tokens, targets: (B, T) int64; targets of -100 do not count.
        micro_step: 0-based count of micro-steps; a window closes when ``micro_step + 1`` is a
            multiple of the accumulation.
        segment_ids: (B, T) document numbers; the model's state is reset where they change.
        opt_steps: optimizer steps known to have been taken so far.

    Returns:
        Metrics (0-d tensors on the model's device: loss_sum, tokens, loss, and at a window's end
        grad_norm and skipped, 1 or 0; a float: lr), or ``None`` when the window is known to be
        dropped; and the new count of optimizer steps.
    """
    accumulation = config.gradient_accumulation_steps
    window = AccumulationWindow.of(optimizer)
    closes = (micro_step + 1) % accumulation == 0
    if micro_step % accumulation == 0:
        window.open(optimizer, tokens.numel() * accumulation)
    with gradient_sync(model, last=closes):
        batch = (tokens, targets, *(() if segment_ids is None else (segment_ids,)))
        passes = window.recording or functools.partial(forward_backward, model, amp_context)
        loss_sum, count = passes(window.divisor, batch)
    window.add(loss_sum, count)
    metrics = {"loss_sum": loss_sum, "tokens": count, "loss": loss_sum / count.clamp_min(1)}
    if closes:
        opt_steps = settle(optimizer, scheduler, log, opt_steps)
        metrics |= _close(window, optimizer, config, micro_step)
        if not window.late:
            before, opt_steps = opt_steps, settle(optimizer, scheduler, log, opt_steps)
            if opt_steps == before:
                return None, opt_steps
    return {**metrics, "lr": scheduler.get_last_lr()[0]}, opt_steps


def settle(
    optimizer: Optimizer, scheduler: LRScheduler, log: Callable[[str], None], opt_steps: int
) -> int:
    """The count of optimizer steps with the last update in it, if that has not been counted yet.

    Waits for the device to get past that update. If it took place, the schedule moves on; if not,
    ``log`` is told, and nothing has changed.
    """
    outcome = AccumulationWindow.of(optimizer).read()
    if outcome is None:
        return opt_steps
    if outcome.dropped:
        log(outcome.line)
        return opt_steps
    scheduler.step()
    return opt_steps + 1


def _close(
    window: AccumulationWindow, optimizer: Optimizer, config: TrainingConfig, micro_step: int
) -> dict[str, Tensor]:
    """Sends the update of a full window and its verdict on their way; waits for neither."""
    norm = gradient_norm(optimizer)
    # float64 holds both exactly; over ranks, as the gradients are.
    sums = torch.stack([torch.as_tensor(window.loss_sum), torch.as_tensor(window.tokens).double()])
    loss_sum, counted = window.world.sum_(sums).unbind()
    weight = counted.clamp_min(1).to(norm.dtype) / (window.divisor * window.world.size)
    norm = norm / weight
    # The one place where a window is judged. The gradients are the ranks' mean and the loss their
    # sum, so all ranks judge alike.
    bad = ~torch.isfinite(norm + loss_sum)
    skip = bad.float() if config.nan_guard else torch.zeros_like(bad, dtype=torch.float32)
    excess = ((norm + 1e-6) / config.max_grad_norm).clamp_min(1)
    update(optimizer, divisor=weight * excess, skip=skip)
    window.verdict = Verdict(skip, loss_sum, counted, norm, micro_step)
    return {"grad_norm": norm, "skipped": skip}
