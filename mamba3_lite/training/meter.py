"""How fast a run goes, and what its micro-steps left on the device since the last look."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any


class Meter:
    """Times a log window.

    The first micro-step of the process (compilation), validation and saving do not count.
    """

    def __init__(self) -> None:
        self.pending: list[dict[str, Any]] = []
        self.grad_norm = math.nan
        self.first_sec: float | None = None
        self._first = True
        self.window_loss_sum, self.window_tokens = 0.0, 0
        self.restart()

    def restart(self) -> None:
        """Opens a new log window."""
        self._start, self._tokens, self._paused_sec = time.perf_counter(), 0, 0.0
        if not self._first:
            self.first_sec = None

    def close_window(self) -> float:
        """The token-weighted loss of the accumulation window that ends here; opens the next."""
        loss = self.window_loss_sum / max(1, self.window_tokens)
        self.window_loss_sum, self.window_tokens = 0.0, 0
        return loss

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
        """Trained tokens a second in this window."""
        tokens, elapsed = self._tokens, time.perf_counter() - self._start - self._paused_sec
        if self.first_sec is not None and tokens > self._first_tokens:
            tokens, elapsed = tokens - self._first_tokens, elapsed - self.first_sec
        return tokens / elapsed
