"""A rank that hangs ends the run, and says where it hung; one that gets on says so, too.

A hang costs more than a crash: nobody is told, and the machines stay taken. What hangs is seldom
Python code, so no exception can come out of it; a thread looks on from outside.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from mamba3_lite.distributed.world import World
from mamba3_lite.training.config import TrainingConfig
from mamba3_lite.training.heartbeat import Heartbeat

# What the command `timeout` returns.
EXIT_HUNG = 124
_LOOK_SEC = 5.0
# For a thread that hangs itself, on a file system or because another holds the interpreter's lock.
_GRACE_SEC = 60.0
_STDERR = 2
# Of the time after which the other ranks give up waiting, whose launcher then kills this one.
_BEFORE_THE_OTHERS = 0.9


class Watchdog:
    """Ends this process once nothing has ended for too long; the leader writes the heartbeat.

    A thread looks every few seconds, so :meth:`beat` costs a clock reading. It ends the process
    with ``EXIT_HUNG`` after ``config.watchdog_sec``; among several ranks, from the first micro-step
    (which compiles) on, a little before ``config.rank_timeout_sec`` if that is earlier: else the
    ranks that wait would give up first, and the stacks of the one that hangs would be lost.

    Args:
        run_dir: where the files go; None (a dry run): nothing is watched or written.
    """

    def __init__(self, run_dir: Path | None, world: World, config: TrainingConfig) -> None:
        self._run_dir, self._world = run_dir, world
        self._first_limit_sec = self._limit_sec = config.watchdog_sec
        if world.size > 1 and config.watchdog_sec:
            others = _BEFORE_THE_OTHERS * config.rank_timeout_sec
            self._limit_sec = min(config.watchdog_sec, others)
        self._look_sec = min(_LOOK_SEC, self._limit_sec / 4 or _LOOK_SEC)
        self._doing, self._facts = "starting", dict[str, Any]()
        self._beaten, self._beaten_at = time.monotonic(), time.time()
        self._started = False
        self._over = threading.Event()
        self._heartbeat: Heartbeat | None = None
        self._thread: threading.Thread | None = None
        self._problem = ""

    def beat(self, doing: str = "training", **facts: float) -> None:
        """Something has ended: a micro-step, a batch of a validation, a save.

        Args:
            doing: what goes on now, one of ``heartbeat.STATES``.
            facts: numbers for the heartbeat, kept until they are given anew.
        """
        self._doing, self._started = doing, True
        self._facts.update(facts)
        self._beaten, self._beaten_at = time.monotonic(), time.time()

    def ended(self, exit_code: int) -> int:
        """The run has come to an end that it knows; gives the code back."""
        self.beat("stopped" if exit_code else "done", exit_code=exit_code)
        return exit_code

    def __enter__(self) -> Self:
        if self._run_dir is None:
            return self
        self._heartbeat = Heartbeat(self._run_dir, rank=self._world.rank)
        if self._world.leads:
            self._heartbeat.forget_exit()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._thread is None or self._heartbeat is None:
            return
        self._over.set()
        self._thread.join()
        if kind is not None:
            self.beat("failed")
        if self._world.leads:
            self._write(self._heartbeat)

    def _watch(self) -> None:
        assert self._heartbeat is not None
        try:
            self._look_on(self._heartbeat)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _look_on(self, heartbeat: Heartbeat) -> None:
        told = 0.0
        while True:
            limit = self._limit_sec if self._started else self._first_limit_sec
            if limit:
                # A thread in C that needs no lock, and ends with 1, should this one hang.
                faulthandler.dump_traceback_later(limit + _GRACE_SEC, exit=True, file=_STDERR)
            if self._world.leads and self._beaten != told:
                told = self._beaten
                self._write(heartbeat)
            if self._over.wait(self._look_sec):
                return
            silent = time.monotonic() - self._beaten
            if limit and silent > limit:
                self._end(heartbeat, silent)

    def _write(self, heartbeat: Heartbeat) -> None:
        facts = dict(self._facts)
        try:
            heartbeat.write(self._doing, self._beaten_at, facts)
            if "exit_code" in facts:
                heartbeat.ended(facts["exit_code"])
        except OSError as problem:
            # A full disk may have room again, and a run is worth more than its heartbeat.
            if str(problem) != self._problem:
                self._problem = str(problem)
                print(f"[warn] no heartbeat: {problem}", file=sys.stderr, flush=True)

    def _end(self, heartbeat: Heartbeat, silent: float) -> None:
        """Says where every thread is, and ends the process without asking any of them."""
        assert self._run_dir is not None
        faulthandler.dump_traceback_later(_GRACE_SEC, exit=True, file=_STDERR)
        path = self._run_dir / f"stacks_rank_{self._world.rank}.txt"
        where = f"opt_step {self._facts.get('opt_step', '?')}"
        line = (
            f"[watchdog] rank {self._world.rank}: nothing has ended for {silent:.0f} s while "
            f"{self._doing} ({where}); stacks are in {path}; exit code {EXIT_HUNG}"
        )
        print(line, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=_STDERR)
        try:
            with open(path, "w", encoding="utf-8") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file=file)
            heartbeat.write("hung", self._beaten_at, dict(self._facts))
            heartbeat.ended(EXIT_HUNG)
        except OSError as problem:
            print(f"[watchdog] cannot write: {problem}", file=sys.stderr, flush=True)
        os._exit(EXIT_HUNG)
