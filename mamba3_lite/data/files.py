"""Files and folders that are there whole and durable, or not at all."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Any

from mamba3_lite.errors import UserError

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def is_full_disk(exc: BaseException | None) -> bool:
    """Whether the exception, or one that caused it, says that the disk or a quota is full."""
    while exc is not None:
        if isinstance(exc, OSError) and exc.errno in _FULL_DISK:
            return True
        if getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return True
        exc = exc.__cause__
    return False


def close_synced(file: BufferedRandom) -> str:
    """Make a written file durable and close it; its SHA-256."""
    file.flush()
    os.fsync(file.fileno())
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.close()
    return digest


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON and fsync it."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_folder(final: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `final` that takes its place when the block ends well.

    On an exception it is removed, with every parent folder made for it. `final` must not exist or
    be empty, unless `replace`. `UserError`: it is not empty, it cannot be written, the disk is
    full, or another process writes it.
    """
    final = Path(final).resolve()
    partial = final.with_name(f".{final.name}.partial")
    with contextlib.ExitStack() as stack:
        try:
            if not replace and final.exists() and (final.is_file() or any(final.iterdir())):
                raise UserError(f"{final}: exists and is not empty; choose another folder")
            stack.enter_context(new_folders(final.parent))
            stack.enter_context(_claim(partial))
        except OSError as exc:
            raise UserError(
                f"{final}: cannot write there ({exc.strerror}); choose another folder"
            ) from exc
        try:
            yield partial
            sync_folder(partial)
            _put_in_place(partial, final)
        except BaseException as exc:
            shutil.rmtree(partial, ignore_errors=True)
            if is_full_disk(exc):
                raise UserError(f"{final}: no space left on the disk; nothing was kept") from exc
            raise


@contextlib.contextmanager
def new_folders(folder: Path) -> Iterator[None]:
    """Make `folder`; after an exception remove again those that were missing and are empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                with contextlib.suppress(FileNotFoundError):
                    path.rmdir()
        raise


@contextlib.contextmanager
def _claim(partial: Path) -> Iterator[None]:
    """Make `partial`, empty, for this process alone.

    A lock tells a killed run's leftovers, which are cleared, from a run in progress.
    """
    partial.mkdir(exist_ok=True)
    with locked_folder(partial):
        clear_folder(partial)
        yield


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone; `UserError` when another process holds it.

    The lock ends with the process, however it ends.
    """
    # Imported here so that reading shards works where there is no fcntl.
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise UserError(f"{folder}: another process is writing here; wait for it") from exc
        yield
    finally:
        os.close(descriptor)


def clear_folder(folder: Path) -> None:
    """Delete everything inside `folder`, and leave itself."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _put_in_place(partial: Path, final: Path) -> None:
    old = final.with_name(f".{final.name}.old")
    if final.exists() and any(final.iterdir()):
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """A rename is durable only once the folder that holds the name is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
