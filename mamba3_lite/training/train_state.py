"""All bookkeeping of a run in one object, saved and loaded whole."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.training.guard import Outcome, SpikeAlarm


@dataclass
class TrainState:
    """Where a run stands.

    At a window boundary this, the weights, the moments and the generators are the whole run.
    """

    opt_step: int = 0
    micro_step: int = 0  # never goes down but in a rollback, so it orders the log
    micro_offset: int = 0  # micro_step at which the windows of the present accumulation start
    samples_seen: int = 0  # position in the global sample stream, skipped spans included
    tokens_seen: int = 0  # tokens that were trained on
    dropped_windows: int = 0
    strikes: int = 0  # dropped windows in a row
    first_strike_sample: int = 0
    rollbacks: int = 0  # since the last checkpoint that holds progress
    skip_spans: list[tuple[int, int]] = field(default_factory=list)  # [start, stop) global samples
    log_loss_sum: float = 0.0  # of the log window that is still open, as of the last checkpoint
    log_tokens: int = 0
    spike: SpikeAlarm = field(default_factory=SpikeAlarm)

    @property
    def window_micro_step(self) -> int:
        """micro_step counted so that windows end at multiples of the accumulation."""
        return self.micro_step - self.micro_offset

    def align(self, accumulation: int) -> None:
        """At a window boundary: windows of ``accumulation`` micro-steps start here."""
        if self.window_micro_step % accumulation:
            self.micro_offset = self.micro_step

    def take_in(self, outcome: Outcome, *, window_start: int) -> None:
        """Counts a window that began at the global sample ``window_start``."""
        if not outcome.dropped:
            self.strikes = 0
            self.tokens_seen += outcome.tokens
            return
        if self.strikes == 0:
            self.first_strike_sample = window_start
        self.strikes += 1
        self.dropped_windows += 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; floats survive exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "TrainState":
        """Strict: every field must be there and no other."""
        names = {f.name for f in dataclasses.fields(cls)}
        if set(saved) != names:
            odd = sorted(set(saved) ^ names)
            raise UserError(f"The checkpoint's training state does not fit this version: {odd}.")
        # JSON knows no tuples.
        spans = [(start, stop) for start, stop in saved["skip_spans"]]
        return cls(**{**saved, "skip_spans": spans, "spike": SpikeAlarm(**saved["spike"])})


@dataclass
class Boundary:
    """What micro-steps move, as it was between two windows; the rest moves with outcomes only.

    A state with these values put back is the run at that boundary, once the outcome of the window
    that ended there has been taken in, so a checkpoint can be written from inside the next window.
    """

    window_start: int  # samples_seen when the window that ended here began
    samples_seen: int
    micro_step: int
    log_sums: Tensor  # (2,) float64 on the device: see Meter
    random: dict[str, Tensor]

    @classmethod
    def after(cls, state: TrainState, *, window_start: int, log_sums: Tensor) -> "Boundary":
        """The one where ``state`` stands."""
        return cls(window_start, state.samples_seen, state.micro_step, log_sums, _random_state())

    def rewound(self, state: TrainState, world: World) -> TrainState:
        """``state`` as it was here; every rank must ask."""
        loss_sum, tokens = world.sum_(self.log_sums.clone()).tolist()
        return dataclasses.replace(
            state, samples_seen=self.samples_seen, micro_step=self.micro_step,
            log_loss_sum=loss_sum, log_tokens=int(tokens),
        )  # fmt: skip


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(saved: dict[str, Tensor]) -> None:
    """The generators as a :class:`Boundary` has them; CUDA's only where there is one."""
    torch.set_rng_state(saved["cpu"])
    if torch.cuda.is_available() and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"])
