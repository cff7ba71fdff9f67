"""AdamW with two parameter groups, and the one gradient norm."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mamba3_lite.training.config import TrainingConfig


def build_optimizer(model: nn.Module, config: "TrainingConfig") -> torch.optim.AdamW:
    """AdamW: parameters with two or more dimensions decay, the rest (norms, the complex A) do not.

    Tied ones count once.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]  # yields a shared one once
    return torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
    )


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict, config: "TrainingConfig") -> None:
    """Moments from a checkpoint, hyperparameters from the configuration.

    A changed knob takes effect from here.
    """
    optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config.lr
        group["betas"] = (config.beta1, config.beta2)
    optimizer.param_groups[0]["weight_decay"] = config.weight_decay


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Global L2 norm of all gradients, a 0-d tensor on their device.

    A complex entry counts with its modulus.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(_real_gradients(parameters))))


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies every gradient by a 0-d tensor, in place."""
    torch._foreach_mul_(_real_gradients(parameters), factor)


def _real_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Views of all gradients as real numbers, which the foreach kernels take."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
