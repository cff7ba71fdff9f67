"""What protects a run from a bad batch.

Whole windows are dropped, repeated ones roll back, spikes raise an alarm.
"""

from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor


class AccumulationWindow:
    """What one optimizer step gathers over its micro-steps.

    Summed loss, token count, and whether it is lost. It belongs to the optimizer whose gradients it
    describes (:meth:`of`).
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
    """Notices a finite loss far above the recent ones.

    The measure is median and median deviation, which a spike itself hardly moves.
    """

    recent: list[float] = field(default_factory=list)

    _WINDOW = 16
    _WARM_UP = 16
    _DEVIATIONS = 12.0
    _AT_LEAST = 0.5  # nat

    def check(self, loss: float) -> str | None:
        """A sentence when the loss of an optimizer step is abnormal; then takes it in."""
        alarm = None
        if len(self.recent) >= self._WARM_UP:
            middle = median(self.recent)
            deviation = median(abs(value - middle) for value in self.recent)
            above = loss - middle
            if above > max(self._AT_LEAST, self._DEVIATIONS * deviation):
                alarm = f"loss {loss:.4f} is {above:.2f} above the recent median {middle:.4f}"
        self.recent = [*self.recent, loss][-self._WINDOW :]
        return alarm
