"""What protects a run from a bad batch: whole windows are dropped, repeated ones roll back, spikes raise an alarm."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class AccumulationWindow:
    """What one optimizer step gathers over its micro-steps: summed loss, token count, and whether it is lost.

    It belongs to the optimizer whose gradients it describes (:meth:`of`).
    """

    loss_sum: Tensor | float
    tokens: Tensor | int
    dropped: bool
    divisor: int  # of every micro-step's loss; a guess at the token count, put right at the end

    def __init__(self) -> None:
        self._clear(1)

    def _clear(self, divisor: int) -> None:
        self.loss_sum, self.tokens, self.dropped, self.divisor = 0.0, 0, False, divisor

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "AccumulationWindow":
        """The window of this optimizer, made on first use."""
        if not hasattr(optimizer, "accumulation_window"):
            optimizer.accumulation_window = cls()  # type: ignore[attr-defined]
        return optimizer.accumulation_window  # type: ignore[attr-defined]

    def open(self, optimizer: torch.optim.Optimizer, divisor: int) -> None:
        """Starts afresh, with no gradients."""
        optimizer.zero_grad(set_to_none=True)
        self._clear(divisor)

    def add(self, loss_sum: Tensor, tokens: Tensor) -> None:
        """Takes in one micro-step."""
        self.loss_sum = self.loss_sum + loss_sum
        self.tokens = self.tokens + tokens

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the whole window up; its gradients are gone at once."""
        self.dropped = True
        optimizer.zero_grad(set_to_none=True)


@dataclass
class SpikeAlarm:
    """Notices a finite loss far above the recent ones: exponential mean and variance over about 20 optimizer steps."""

    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0

    _MEMORY = 0.95
    _WARM_UP = 20
    _SIGMAS = 6.0
    _AT_LEAST = 0.5  # nat

    def check(self, loss: float) -> str | None:
        """A sentence when ``loss`` is abnormal, then takes it in."""
        excess = loss - self.mean
        limit = max(self._AT_LEAST, self._SIGMAS * math.sqrt(self.variance))
        alarm = None
        if self.seen >= self._WARM_UP and excess > limit:
            alarm = f"loss {loss:.4f} is {excess:.2f} above the recent mean {self.mean:.4f}"
        self.seen += 1
        # Equal weights at first, so that the mean does not start from zero.
        weight = max(1 - self._MEMORY, 1 / self.seen)
        self.mean += weight * excess
        self.variance = (1 - weight) * (self.variance + weight * excess * excess)
        return alarm
