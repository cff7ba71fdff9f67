"""Progress bars of `prepare`: on a terminal only, with rates and the time left."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# A redraw costs more than a small batch.
_REDRAW_SEC = 0.1


@dataclass
class StageBar:
    """Counts the work of one stage, and draws it where there is a terminal."""

    progress: Progress | None = None
    task: TaskID = TaskID(0)
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    begun: float = field(default_factory=time.monotonic)
    drawn: float = 0.0

    def advance(self, *, documents: int, text_bytes: int, tokens: int, completed: float) -> None:
        """Add what was done; `completed` in the unit of the bar's total."""
        self.documents += documents
        self.text_bytes += text_bytes
        self.tokens += tokens
        now = time.monotonic()
        if self.progress is not None and now - self.drawn >= _REDRAW_SEC:
            self.drawn = now
            self.progress.update(self.task, completed=completed, rates=self._rates(now))

    def finish(self) -> None:
        """Show the whole as done."""
        if self.progress is not None:
            rates = self._rates(time.monotonic())
            self.progress.update(self.task, total=1, completed=1, rates=rates)

    def _rates(self, now: float) -> str:
        seconds = max(now - self.begun, 1e-9)
        rates = [f"{self.documents / seconds:,.0f} documents/s"]
        if self.text_bytes:
            rates.append(f"{self.text_bytes / 1e6 / seconds:,.2f} MB/s")
        return "  ".join([*rates, f"{self.tokens / seconds:,.0f} tokens/s"])


@contextlib.contextmanager
def stage_bar(name: str, total: float | None, *, wanted: bool) -> Iterator[StageBar]:
    """A bar on standard error for one stage; `total` None: how much there is, is not known."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield StageBar()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%  {task.fields[rates]}  left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = StageBar(progress, progress.add_task(name, total=total, rates=""))
        yield bar
        bar.finish()
