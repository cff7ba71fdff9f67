"""One micro-step, and the optimizer step when it closes an accumulation window."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mamba3_lite.training.config import TrainingConfig
from mamba3_lite.training.guard import AccumulationWindow
from mamba3_lite.training.losses import next_token_loss
from mamba3_lite.training.optim import gradient_norm, scale_gradients


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
    with a non-finite loss or gradient norm changes nothing.

    Args:
        tokens, targets: (B, T) int64; targets of -100 do not count.
        micro_step: 0-based count of micro-steps; a window closes when ``micro_step + 1`` is a
            multiple of the accumulation.
        segment_ids: (B, T) document numbers; the model's state is reset where they change.
        opt_steps: optimizer steps taken so far.

    Returns:
        Metrics (0-d tensors on the model's device: loss_sum, tokens, loss, and at a window's end
        grad_norm; a float: lr), or ``None`` when the micro-step is known to be dropped; and the new
        count of optimizer steps.
    """
    accumulation = config.gradient_accumulation_steps
    window = AccumulationWindow.of(optimizer)
    if micro_step % accumulation == 0:
        window.open(optimizer, tokens.numel() * accumulation)
    metrics: dict[str, Any] | None = None
    if not window.dropped:
        with amp_context:
            loss_sum, count = next_token_loss(model, tokens, targets, segment_ids=segment_ids)
        (loss_sum / window.divisor).backward()
        loss_sum = loss_sum.detach()
        window.add(loss_sum, count)
        metrics = {"loss_sum": loss_sum, "tokens": count, "loss": loss_sum / count.clamp_min(1)}
        # On a CPU looking costs nothing; on a GPU it would stop the queue, so it waits for the
        # window's end.
        if config.nan_guard and loss_sum.device.type == "cpu" and not torch.isfinite(loss_sum):
            window.drop(optimizer)
            log(f"[nan-guard] loss {float(loss_sum)} at micro_step {micro_step}: window dropped")
            metrics = None
    if (micro_step + 1) % accumulation == 0 and not window.dropped:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        rescale = window.divisor / torch.as_tensor(window.tokens).clamp_min(1).to(loss_sum)
        norm = gradient_norm(parameters) * rescale
        if config.nan_guard and not bool(torch.isfinite(norm + window.loss_sum)):
            window.drop(optimizer)
            problem = f"gradient norm {float(norm)} at micro_step {micro_step}"
            log(f"[nan-guard] {problem}: window dropped")
            metrics = None
        else:
            clip = (config.max_grad_norm / (norm + 1e-6)).clamp_max(1)
            scale_gradients(parameters, rescale * clip)
            optimizer.step()
            scheduler.step()
            opt_steps += 1
            assert metrics is not None
            metrics["grad_norm"] = norm
    if metrics is not None:
        metrics["lr"] = scheduler.get_last_lr()[0]
    return metrics, opt_steps
