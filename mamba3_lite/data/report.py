"""What a `prepare` tells when it is done."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table


@dataclass
class SourceReport:
    """What one source gave. Tokens include one EOS per document.

    `weight` and `share` are its wanted and actual parts of the training tokens; `passes` is how
    often training goes through what was read of it; `used_up`: all of it is used.
    """

    name: str
    weight: float
    share: float
    documents: int
    tokens: int
    val_documents: int
    val_tokens: int
    passes: float
    used_up: bool
    records: int
    read_documents: int
    read_tokens: int
    text_bytes: int
    repaired: int
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass
class PrepareReport:
    """What `prepare` wrote. Tokens include one EOS per document; bytes are UTF-8 bytes of text.

    `documents` and `tokens` are of both splits together.
    """

    train_path: str
    val_path: str | None
    shards: int = 0
    sources: list[SourceReport] = field(default_factory=list)
    already_prepared: bool = False

    @property
    def documents(self) -> int:
        """Documents of both splits."""
        return self.val_documents + sum(source.documents for source in self.sources)

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return self.val_tokens + sum(source.tokens for source in self.sources)

    @property
    def val_documents(self) -> int:
        """Documents of the validation split."""
        return sum(source.val_documents for source in self.sources)

    @property
    def val_tokens(self) -> int:
        """Tokens of the validation split."""
        return sum(source.val_tokens for source in self.sources)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text that was tokenised, within the budget or not."""
        return sum(source.text_bytes for source in self.sources)

    @property
    def repaired(self) -> int:
        """Documents in which invalid Unicode became U+FFFD."""
        return sum(source.repaired for source in self.sources)

    @property
    def skipped(self) -> dict[str, int]:
        """Records that gave no document, by reason: bad ones, dropped ones and duplicates."""
        counts: Counter[str] = Counter()
        for source in self.sources:
            counts.update(source.skipped)
        return dict(counts)

    def stored(self) -> dict[str, Any]:
        """JSON-ready, with the totals for other readers."""
        totals = {
            name: getattr(self, name)
            for name in (
                "documents", "tokens", "val_documents", "val_tokens", "text_bytes", "repaired",
                "skipped",
            )
        }  # fmt: skip
        return {**totals, **asdict(self)}

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token; 0 where only ids were read."""
        return self.text_bytes / sum(source.read_tokens for source in self.sources)


def report_from(stored: dict[str, Any]) -> PrepareReport:
    """What `PrepareReport.stored` gave; `TypeError` or `KeyError` for anything else."""
    return PrepareReport(
        train_path=stored["train_path"],
        val_path=stored["val_path"],
        shards=stored["shards"],
        sources=[SourceReport(**source) for source in stored["sources"]],
    )


def summary(report: PrepareReport) -> Group:
    """Two tables for the screen: the whole, and each source with what it lost."""
    whole = Table("prepared", "", show_header=False)
    rows = {
        "train": report.train_path,
        "validation": report.val_path or "none",
        "documents": f"{report.documents:,} ({report.val_documents:,} in validation)",
        "tokens": f"{report.tokens:,} ({report.val_tokens:,} in validation)",
        "bytes per token": f"{report.bytes_per_token:.2f}",
        "shards": f"{report.shards:,}",
        "documents repaired": f"{report.repaired:,}",
    }
    for name, value in rows.items():
        whole.add_row(name, value)
    sources = Table("source", "documents", "tokens", "share / weight", "duplicates", "dropped")
    for source in report.sources:
        dropped = dict(source.skipped)
        duplicates = sum(dropped.pop(name, 0) for name in ("duplicate", "near_duplicate"))
        sources.add_row(
            source.name,
            f"{source.documents + source.val_documents:,}",
            f"{source.tokens + source.val_tokens:,}",
            f"{source.share:.2%} / {source.weight:.2%}" + _use(source),
            f"{duplicates:,}",
            ", ".join(f"{n:,} {reason}" for reason, n in dropped.items()) or "none",
        )
    return Group(whole, sources)


def _use(source: SourceReport) -> str:
    if source.passes > 1:
        return f" ({source.passes:.2f} passes)"
    return " (all used)" if source.used_up else ""
