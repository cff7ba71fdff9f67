"""What protects a run from a bad batch.

Whole windows are dropped, repeated ones roll back, spikes raise an alarm.
"""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mamba3_lite.distributed.world import World
from mamba3_lite.training.passes import Recording


class Outcome(NamedTuple):
    """How an accumulation window ended, as far as the host has to know."""

    dropped: bool
    loss_sum: float
    tokens: int
    grad_norm: float
    micro_step: int  # its last one

    @property
    def loss(self) -> float:
        """Token-weighted mean in nat."""
        return self.loss_sum / max(1, self.tokens)

    @property
    def line(self) -> str:
        """What there is to say about a dropped window."""
        loss, norm = f"loss {self.loss_sum}", f"gradient norm {self.grad_norm}"
        problem = norm if math.isfinite(self.loss_sum) else loss
        return f"[nan-guard] {problem} at micro_step {self.micro_step}: window dropped"


class Verdict:
    """An outcome on its way from the device, which nobody waits for before :meth:`read`."""

    def __init__(
        self, skip: Tensor, loss_sum: Tensor, tokens: Tensor, grad_norm: Tensor, micro_step: int
    ):
        self._micro_step = micro_step
        # float64 holds each of them exactly.
        figures = torch.stack([t.double() for t in (skip, loss_sum, tokens, grad_norm)])
        self._figures, self._arrival = figures, None
        if figures.is_cuda:
            self._figures = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)
            self._arrival = torch.cuda.Event(blocking=True)
            self._arrival.record()

    def read(self) -> Outcome:
        """Waits for the device to get past the window's update, and for nothing later."""
        if self._arrival is not None:
            self._arrival.synchronize()
        skip, loss_sum, tokens, grad_norm = self._figures.tolist()
        return Outcome(bool(skip), loss_sum, int(tokens), grad_norm, self._micro_step)


class AccumulationWindow:
    """What one optimizer step gathers over its micro-steps, and how the one before ended.

    It belongs to the optimizer whose gradients it describes (:meth:`of`).
    """

    loss_sum: Tensor | float
    tokens: Tensor | int
    divisor: int  # of every micro-step's loss; a guess at the token count, put right at the end

    def __init__(self) -> None:
        self.loss_sum, self.tokens, self.divisor = 0.0, 0, 1
        # False: train_step reads a window's outcome when it closes. True: when the next one closes,
        # while the device is busy with that one; whoever needs it earlier calls settle.
        self.late = False
        # In the place of the plain passes of a micro-step.
        self.recording: Recording | None = None
        self.world = World.alone()  # whose micro-steps make a window together
        self.verdict: Verdict | None = None  # of the last update, until it is read
        self.outcome: Outcome | None = None  # the last one read, until it is taken

    @classmethod
    def of(cls, optimizer: Optimizer) -> "AccumulationWindow":
        """The window of this optimizer, made on first use."""
        if not hasattr(optimizer, "accumulation_window"):
            optimizer.accumulation_window = cls()  # type: ignore[attr-defined]
        return optimizer.accumulation_window  # type: ignore[attr-defined]

    def open(self, optimizer: Optimizer, divisor: int) -> None:
        """Starts afresh, with no gradients."""
        optimizer.zero_grad(set_to_none=True)
        self.loss_sum, self.tokens, self.divisor = 0.0, 0, divisor

    def add(self, loss_sum: Tensor, tokens: Tensor) -> None:
        """Takes in one micro-step."""
        self.loss_sum = self.loss_sum + loss_sum.double()
        self.tokens = self.tokens + tokens

    def read(self) -> Outcome | None:
        """The outcome of the last update, unless it has been read before."""
        if self.verdict is None:
            return None
        self.outcome, self.verdict = self.verdict.read(), None
        return self.outcome

    def take(self) -> Outcome | None:
        """The outcome read last, once: for whoever keeps the books."""
        outcome, self.outcome = self.outcome, None
        return outcome

    def forget(self) -> None:
        """The last update has been undone from outside, whatever came of it."""
        self.verdict = self.outcome = None


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
