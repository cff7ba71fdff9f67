"""All bookkeeping of a run in one object, saved and loaded whole."""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mamba3_lite.errors import UserError
from mamba3_lite.training.guard import SpikeAlarm


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
    log_loss_sum: float = 0.0  # of the log window that is still open
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

    def snapshot(self) -> "TrainState":
        """An independent copy."""
        return copy.deepcopy(self)

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
