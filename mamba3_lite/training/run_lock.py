"""One job at a time in a run folder."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from mamba3_lite.errors import UserError


class RunLock:
    """Held by the job that writes to a run folder, until :meth:`release` or the process's end.

    The lock is on the folder itself, which the kernel frees however the process ends, so no file
    has to be removed by hand. Where the file system knows no such locks, nothing is held.

    Raises:
        UserError: another job holds it, or the folder cannot be made.
    """

    def __init__(self, run_dir: Path) -> None:
        self._descriptor = -1
        try:
            self._made = [p for p in (run_dir, *run_dir.parents) if not p.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as problem:
            raise UserError(
                f"cannot write logs to {run_dir}: {problem.strerror}; make it writable or choose "
                "another run folder"
            ) from problem
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno == errno.EWOULDBLOCK:
                self._close()
                raise UserError(
                    f"{run_dir} is in use by another job; wait for it, stop it, or choose another "
                    "training.save_dir"
                ) from None

    def release(self) -> None:
        """Lets the next job in; folders that were made for this one and are still empty go."""
        self._close()
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self._close()
