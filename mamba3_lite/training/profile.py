"""A profile of a few micro-steps: a trace to look at, and a table of the costliest operators."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mamba3_lite import hardware
from mamba3_lite.errors import UserError

FOLDER, TRACE, OPERATORS = "profile", "trace.json.gz", "operators.txt"
MICRO_STEPS = 4
# Compilation and autotuning, the first moments, and the first window whose outcome comes late.
WARM_UP_OPT_STEPS = 2
_ROWS = 40


class MicroStepProfiler:
    """Stands in for a function of micro-steps and profiles four of them, once.

    The last of them ends an accumulation window, so the profile holds an update; at least two
    windows go before. Every other call is passed on as it is.

    Args:
        run_dir: gets ``profile/trace.json.gz``, which Perfetto and chrome://tracing open, and
            ``profile/operators.txt``, the operators by their own time.
        accumulation: micro-steps of an optimizer step.
        log: takes a line.

    Raises:
        UserError: the folder cannot be written, before the first micro-step.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        accumulation: int,
        device: torch.device,
        log: Callable[[str], None],
    ) -> None:
        windows = WARM_UP_OPT_STEPS + math.ceil(MICRO_STEPS / accumulation)
        self.opt_steps = windows  # that a run must take at least
        self._last = windows * accumulation
        self._first = self._last - MICRO_STEPS  # of the process, counted from 0
        self._done = 0
        self._device, self._log = device, log
        self._folder = run_dir / FOLDER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(
                f"{self._folder}: cannot write there ({problem.strerror}); choose another "
                "training.save_dir, or leave --profile out."
            ) from problem
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._torch = profile(activities=activities)

    def around(
        self,
        micro_step: Callable[..., None],
        paused: Callable[[], AbstractContextManager[None]],
    ) -> Callable[..., None]:
        """``micro_step`` with the profile; the files are written inside of ``paused()``."""

        def profiled(*batch: Any) -> None:
            if self._done == self._first - 1:
                self._torch.prepare_trace()
            elif self._done == self._first:
                self._synchronize()
                self._torch.start_trace()
                self._start = time.perf_counter()
            with record_function("micro_step"):
                micro_step(*batch)
            self._done += 1
            if self._done == self._last:
                self._synchronize()
                elapsed = time.perf_counter() - self._start
                with paused():
                    self._torch.stop_trace()
                    self._write(elapsed)

        return profiled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._done >= self._last:
            return
        if self._done >= self._first:
            self._torch.stop_trace()
        self._log(
            f"[profile] nothing was written: the run ended after {self._done} micro-steps, the "
            f"profile needs {self._last}"
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write(self, elapsed: float) -> None:
        own = "self_cpu_time_total" if self._device.type == "cpu" else "self_cuda_time_total"
        facts = (
            f"{MICRO_STEPS} micro-steps, number {self._first + 1} to {self._last} of the process, "
            f"in {1e3 * elapsed:.1f} ms under the profiler, on {hardware.device_name(self._device)}"
        )
        operators = self._torch.key_averages().table(sort_by=own, row_limit=_ROWS)
        try:
            self._torch.export_chrome_trace(str(self._folder / TRACE))
            (self._folder / OPERATORS).write_text(f"{facts}\n{operators}\n", encoding="utf-8")
        except OSError as problem:  # the run is worth more than its profile
            self._log(f"[warn] the profile could not be written: {problem}")
        else:
            self._log(f"[profile] {facts}: {TRACE} and {OPERATORS} in {self._folder}")
