"""A progress bar on standard error, where there is a terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_bar(name: str, total: int | None, *, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields what counts on by so many units; ``total`` None: how many there are is not known."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    begun, done = time.monotonic(), 0
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(name, total=total, rate="")

        def advance(count: int) -> None:
            nonlocal done
            done += count
            rate = done / max(time.monotonic() - begun, 1e-9)
            shown.update(task, completed=done, rate=f"{done:,} {unit}, {rate:,.0f}/s")

        yield advance
