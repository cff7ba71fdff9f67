"""How fast a run goes, and the losses of its log window, which stay on the device until asked."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mamba3_lite import hardware
from mamba3_lite.distributed.world import World


class Meter:
    """Times a log window and sums its losses.

    The first micro-step of the process (compilation), validation and saving do not count. Losses
    lie on ``device``, and are those of this rank.
    """

    # (2,) float64: summed loss and tokens of the log window's closed accumulation windows. Never
    # changed in place: who keeps a reference keeps the value.
    log_sums: Tensor

    def __init__(self, device: torch.device) -> None:
        self.grad_norm = math.nan
        self.first_sec: float | None = None
        self._first = True
        self._device = device
        self.restart()

    def restart(self, *, loss_sum: float = 0.0, tokens: int = 0) -> None:
        """Opens a log window; one that an earlier process has left open holds something already."""
        self.log_sums = torch.tensor([loss_sum, tokens], dtype=torch.float64).to(self._device)
        self._open = torch.zeros_like(self.log_sums)
        self._start, self._tokens, self._paused_sec = time.perf_counter(), 0, 0.0
        if not self._first:
            self.first_sec = None

    def add(self, loss_sum: Tensor, tokens: Tensor) -> None:
        """Takes in the loss of a micro-step (0-d tensors), unless it is not finite."""
        both = torch.stack((loss_sum.double(), tokens.double()))
        self._open = self._open + both.where(loss_sum.isfinite(), 0.0)

    def close_window(self, skipped: Tensor) -> None:
        """Ends an accumulation window; its losses do not count where it was ``skipped``."""
        self.log_sums = self.log_sums + self._open.where(skipped == 0, 0.0)
        self._open = torch.zeros_like(self._open)

    def row(self, world: World, flops_per_token: int) -> dict[str, Any]:
        """What this window says of all ranks: loss, speed and memory; every rank must ask.

        The slowest rank is the one that the others wait for.
        """
        loss = self.mean_loss(world)  # first: the time below is then that of the device's work
        tps = world.size * self.tokens_per_sec()
        memory = world.gather(hardware.peak_memory_bytes(self._device) / 2**30)
        row: dict[str, Any] = {
            "loss": loss,
            "tps": tps,
            "grad_norm": self.grad_norm,
            "peak_mem_gib": max(memory),
        }
        peak = hardware.peak_bf16_flops(hardware.device_name(self._device))
        if peak is not None and self._device.type == "cuda":
            row["mfu"] = flops_per_token * tps / (peak * world.size)
        if world.size > 1:
            waited, world.waited_sec = world.gather(world.waited_sec), 0.0
            row |= {
                "ranks": world.size, "least_peak_mem_gib": min(memory),
                "slowest_rank": waited.index(min(waited)), "longest_wait_sec": max(waited),
            }  # fmt: skip
        return row

    def mean_loss(self, world: World) -> float:
        """Token-weighted, of all ranks' log window so far; NaN without a token.

        Waits for the device.
        """
        loss_sum, tokens = world.sum_(self.log_sums + self._open).tolist()
        return loss_sum / tokens if tokens else math.nan

    def took(self, tokens: int) -> None:
        """Counts a micro-step."""
        self._tokens += tokens
        if self._first:
            self._first = False
            self.first_sec = time.perf_counter() - self._start
            self._first_tokens = tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        start = time.perf_counter()
        yield
        self._paused_sec += time.perf_counter() - start

    def tokens_per_sec(self) -> float:
        """Tokens a second of this rank in this window."""
        tokens, elapsed = self._tokens, time.perf_counter() - self._start - self._paused_sec
        if self.first_sec is not None and tokens > self._first_tokens:
            tokens, elapsed = tokens - self._first_tokens, elapsed - self.first_sec
        return tokens / elapsed
