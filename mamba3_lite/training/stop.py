"""Why a run should stop before its end."""

import math
import signal
import time

# Saved, and started again it goes on: the code batch systems know as a temporary failure.
EXIT_OUT_OF_TIME = 75


class StopRequest:
    """Turns SIGINT, SIGTERM and a time limit into a wish that the loop reads once a micro-step.

    A second signal kills at once.
    """

    def __init__(self, max_time_sec: float):
        self._deadline = time.monotonic() + max_time_sec if max_time_sec else math.inf
        self._signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        self._old = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = signal.Signals(number)
        signal.signal(number, self._old[self._signal])

    @property
    def code(self) -> int | None:
        """The exit code when the run should stop, else None."""
        if self._signal is not None:
            return 128 + self._signal
        return EXIT_OUT_OF_TIME if time.monotonic() > self._deadline else None

    @property
    def reason(self) -> str:
        """What asked for the stop."""
        return self._signal.name if self._signal is not None else "out of time"
