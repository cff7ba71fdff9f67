"""AdamW with two parameter groups, the one gradient norm, and an update that the device can skip.

Nothing here reads a value back from the device.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mamba3_lite.training.config import TrainingConfig


class RealView(nn.Parameter):
    """A complex parameter (...) as real numbers (..., 2): the same storage, the same gradient.

    The fused kernel takes real tensors only. AdamW of a complex parameter is by definition AdamW of
    its real and imaginary parts, so nothing changes but who is asked.
    """

    source: nn.Parameter

    def __new__(cls, source: nn.Parameter) -> "RealView":
        view = super().__new__(cls, torch.view_as_real(source.detach()))
        view.source = source
        return view

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """A real view of the complex gradient, as it is now."""
        # A model that is moved leaves the view behind, and updates would go nowhere.
        assert self.data_ptr() == self.source.data_ptr(), "the model moved under its optimizer"
        return None if self.source.grad is None else torch.view_as_real(self.source.grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.source.grad = None if value is None else torch.view_as_complex(value)


def build_optimizer(model: nn.Module, config: "TrainingConfig") -> torch.optim.AdamW:
    """Fused AdamW: parameters with two or more dimensions decay, the rest (norms, A) do not.

    Tied ones count once; complex ones take part as :class:`RealView`. The model must be on its
    device already.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for p in model.parameters():  # yields a shared one once
        if p.requires_grad:
            groups[p.dim() < 2].append(RealView(p) if p.is_complex() else p)
    decaying, rest = groups
    return torch.optim.AdamW(
        [
            {"params": decaying, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
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


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Global L2 norm of all gradients, a 0-d tensor on their device.

    A complex entry counts with its modulus.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(_real_gradients(optimizer))))


def update(optimizer: torch.optim.Optimizer, *, divisor: Tensor, skip: Tensor) -> None:
    """One optimizer step with every gradient divided by ``divisor``; none at all where ``skip``.

    Both are 0-d tensors on the gradients' device, ``skip`` float32: 0 or 1. A fused optimizer takes
    them into its kernel, by the protocol of torch's gradient scaler: division costs no pass of its
    own, and a skipped step leaves weights, moments and step counts untouched without anybody
    looking at the flag. For any other optimizer both happen here, and the host waits.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(skip):
        torch._foreach_div_(_real_gradients(optimizer), divisor)
        optimizer.step()


def _real_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Views of all gradients as real numbers, which the foreach kernels take."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
