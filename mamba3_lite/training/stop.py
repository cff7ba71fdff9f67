"""Why a run should stop before its end."""

import math
import os
import signal
import time

# Saved, and started again it goes on: the code batch systems know as a temporary failure.
EXIT_OUT_OF_TIME = 75
# Slurm signals every process of a step, and torchrun then passes on what it got itself.
_SAME_REQUEST_SEC = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Turns signals and a time limit into a wish that the loop reads once a micro-step.

    SIGUSR1 is how a batch system says that the time is nearly over; SIGINT and SIGTERM are wishes
    of somebody else. A second signal kills at once, unless it follows so soon that it is the first
    one's echo.
    """

    def __init__(self, max_time_sec: float):
        self._deadline = time.monotonic() + max_time_sec if max_time_sec else math.inf
        self._signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        self._old = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        now, asked = time.monotonic(), signal.Signals(number)
        if self._signal is None:
            self._signal, self._asked_at = asked, now
        elif now - self._asked_at > _SAME_REQUEST_SEC:
            signal.signal(number, self._old[asked])
            os.kill(os.getpid(), number)

    @property
    def code(self) -> int | None:
        """The exit code when the run should stop, else None."""
        if self._signal is not None:
            out_of_time = self._signal is signal.SIGUSR1
            return EXIT_OUT_OF_TIME if out_of_time else 128 + self._signal
        return EXIT_OUT_OF_TIME if time.monotonic() > self._deadline else None

    @property
    def reason(self) -> str:
        """What asked for the stop."""
        return self._signal.name if self._signal is not None else "out of time"
