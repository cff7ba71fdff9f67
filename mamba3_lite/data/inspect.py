"""What prepared data hold: counts, document lengths, sources, and the text at any position.

Works on every format that :class:`mamba3_lite.data.dataset.TokenStream` reads. Where there is no
document index the tokens are read once and an EOS ends a document. Memory: 16 bytes a document.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from mamba3_lite.data.dataset import Tokens, TokenStream
from mamba3_lite.data.prepare import REPORT
from mamba3_lite.data.shards import MANIFEST
from mamba3_lite.data.tokenizer import Tokenizer, load_tokenizer
from mamba3_lite.errors import UserError, reading

SAMPLE_TOKENS = 200
_BAR_CHARS = 40


@dataclass(frozen=True)
class SourceShare:
    """What one source gave; `share` is its part of all tokens."""

    name: str
    documents: int
    tokens: int
    share: float


@dataclass(frozen=True)
class Sample:
    """Tokens from a position on. `offset` is the position in its document of `length` tokens."""

    position: int
    document: int
    offset: int
    length: int
    source: str | None
    ids: list[int]
    text: str


class Inspection:
    """The data at a path, read once.

    Args:
        path: what a training run could name as data.train_data_path.
        tokenizer: to decode with, and whose EOS ends a document where the data do not say; None:
            the one that the data name, else `fallback`.

    Raises:
        UserError: data that cannot be read, are empty or hold ids outside the vocabulary; a
            tokenizer that is not the one of the data.
    """

    def __init__(
        self, path: str | Path, *, tokenizer: str | None = None, fallback: str = "gpt2"
    ) -> None:
        self.stream = TokenStream(path)
        self.tokens = self.stream.n_tokens
        if not self.tokens:
            raise UserError(f"{path}: holds no tokens; prepare the data again")
        self.manifest: dict[str, Any] = (
            self.stream.folder.manifest if self.stream.folder is not None else {}
        )
        named = self.manifest.get("tokenizer", {}).get("name")
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer or named or fallback)
        self._check_tokenizer()
        header = self.stream.header
        self.eos_id = self.tokenizer.eos_id if header is None else header.eos_id
        self.largest_id, self.starts = self._scan()
        self.lengths: Tokens = np.diff(self.starts, append=self.tokens)

    @property
    def format(self) -> str:
        """The format in words."""
        if self.stream.header is None:
            return "torch.save'd int64 tensors"
        index = "with" if self.stream.has_index else "without"
        return f"mamba3-lite shards, {self.stream.header.dtype.name}, {index} document index"

    @property
    def size_bytes(self) -> int:
        """Bytes of the token files."""
        return sum(file.path.stat().st_size for file in self.stream.files)

    @property
    def ends_with_eos(self) -> bool:
        """Whether the last document is whole."""
        return int(self.stream.read(self.tokens - 1, self.tokens)[0]) == self.eos_id

    def sources(self) -> list[SourceShare]:
        """Share of each source, counted from the index; empty where the data have none."""
        if not self.stream.has_index:
            return []
        assert self.stream.folder is not None
        owners, names = self.stream.folder.document_sources(), self.manifest["sources"]
        documents = np.bincount(owners, minlength=len(names)).tolist()
        # The weights of bincount are float64, exact below 2^53 tokens.
        tokens = np.bincount(owners, self.lengths, len(names)).astype(np.int64).tolist()
        return [
            SourceShare(entry["name"], d, t, t / self.tokens)
            for entry, d, t in zip(names, documents, tokens, strict=True)
        ]

    def skipped(self) -> dict[str, int] | None:
        """Documents left out by reason, both splits together; None where nothing says it."""
        places = [self.stream.path]
        if self.stream.path.name in ("train", "val"):
            places.append(self.stream.path.parent)
        for path in (place / REPORT for place in places):
            if not path.is_file():
                continue
            with reading(str(path), "correct its permissions"):
                text = path.read_text(encoding="utf-8")
            try:
                return dict(json.loads(text)["report"]["skipped"])
            except (ValueError, KeyError, TypeError) as problem:
                raise UserError(
                    f"{path}: not a report of prepare ({problem!r}); prepare the data again, or "
                    "remove this file"
                ) from problem
        return None

    def sample(self, position: int, count: int = SAMPLE_TOKENS) -> Sample:
        """`count` tokens from `position` on, fewer at the end; `UserError` outside the data."""
        if not 0 <= position < self.tokens:
            raise UserError(
                f"position {position} is outside the data; {self.stream.path} holds tokens 0 to "
                f"{self.tokens - 1}"
            )
        ids = self.stream.read(position, min(position + count, self.tokens)).tolist()
        document = int(np.searchsorted(self.starts, position, side="right")) - 1
        source = None
        if self.stream.has_index:
            assert self.stream.folder is not None
            owner = int(self.stream.folder.document_sources()[document])
            source = self.manifest["sources"][owner]["name"]
        return Sample(
            position=position,
            document=document,
            offset=position - int(self.starts[document]),
            length=int(self.lengths[document]),
            source=source,
            ids=ids,
            text=self.tokenizer.decode(ids),
        )

    def _check_tokenizer(self) -> None:
        header = self.stream.header
        if header is not None and header.tokenizer_sha256 != self.tokenizer.fingerprint:
            raise UserError(
                f"{self.stream.path}: prepared with another tokenizer than {self.tokenizer.name!r} "
                "(their SHA-256 differ); name the right one with --tokenizer"
            )

    def _scan(self) -> tuple[int, Tokens]:
        """(largest id, start of every document (n,) int64), without reading tokens if possible."""
        headers = [file.header for file in self.stream.files if file.header is not None]
        if self.stream.has_index:
            self.stream.check_index()
            return max(header.max_id for header in headers), self.stream.document_starts()
        starts, low, high = [np.zeros(1, np.int64)], 0, 0
        for offset, part in self.stream.pieces():
            starts.append(np.flatnonzero(part == self.eos_id) + offset + 1)
            low, high = min(low, int(part.min())), max(high, int(part.max()))
        if low < 0 or high >= self.tokenizer.vocab_size:
            raise UserError(
                f"{self.stream.path}: holds id {low if low < 0 else high}, outside the vocabulary "
                f"of {self.tokenizer.name!r} (0 to {self.tokenizer.vocab_size - 1}); name the "
                "tokenizer of these data with --tokenizer"
            )
        found = np.concatenate(starts)
        return high, found[found < self.tokens]


def splits_of(path: str | Path) -> list[Path]:
    """The folders of shards below an output of `prepare`, training first; else the path itself."""
    path = Path(path)
    with reading(f"data path {path}", "correct the path or its permissions"):
        train = [path / "train"] if (path / "train" / MANIFEST).is_file() else [path]
        return train + ([path / "val"] if (path / "val" / MANIFEST).is_file() else [])


def length_bins(lengths: Tokens) -> list[tuple[int, int, int]]:
    """(shortest, longest, documents) for every power of two that lengths (n,) fall between."""
    bins = 1 + int(lengths.max()).bit_length() - int(lengths.min()).bit_length()
    first = int(lengths.min()).bit_length() - 1
    edges = 2 ** np.arange(first, first + bins + 1)
    counts, _ = np.histogram(lengths, edges)
    return [
        (int(low), int(high) - 1, int(count))
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]


def facts_table(data: Inspection) -> Table:
    """Counts, vocabulary, tokenizer and lengths."""
    header = data.stream.header
    tail = "" if data.ends_with_eos else " (the last one has no EOS)"
    middle, nine_tenths = np.percentile(data.lengths, (50, 90))
    rows = {
        "format": data.format,
        "files": f"{len(data.stream.files):,} ({data.size_bytes / 1e6:,.1f} MB)",
        "tokens": f"{data.tokens:,}",
        "documents": f"{len(data.starts):,}{tail}",
        "vocabulary": f"{(header or data.tokenizer).vocab_size:,} (largest id {data.largest_id:,})",
        "tokenizer": f"{data.tokenizer.name} (EOS {data.eos_id:,})",
        "tokens per document": f"mean {data.lengths.mean():,.0f}, median {middle:,.0f}, "
        f"90 % below {nine_tenths:,.0f}, longest {data.lengths.max():,}",
    }
    skipped = data.skipped()
    if skipped is not None:
        duplicates = sum(n for reason, n in skipped.items() if "duplicate" in reason)
        rest = ", ".join(f"{n:,} {r}" for r, n in skipped.items() if "duplicate" not in r)
        rows["duplicates removed"] = f"{duplicates:,}"
        rows["skipped otherwise"] = rest or "none"
    table = Table(escape(str(data.stream.path)), "")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def sources_table(sources: list[SourceShare]) -> Table:
    """Documents, tokens and share of each source."""
    table = Table("source", "documents", "tokens", "share")
    for source in sources:
        table.add_row(
            escape(source.name),
            f"{source.documents:,}",
            f"{source.tokens:,}",
            f"{source.share:.2%}",
        )
    return table


def histogram_lines(lengths: Tokens) -> list[str]:
    """Documents by length as a text picture, one line for each power of two."""
    bins = length_bins(lengths)
    most = max(count for _, _, count in bins)
    wide = len(f"{bins[-1][1]:,}")
    lines = ["documents by length in tokens, EOS included:"]
    for low, high, count in bins:
        # A document must not vanish by rounding.
        bar = "#" * (max(1, round(_BAR_CHARS * count / most)) if count else 0)
        share = count / len(lengths)
        lines.append(
            f"{low:>{wide},} - {high:>{wide},} |{bar:<{_BAR_CHARS}} {count:,} ({share:.1%})"
        )
    return lines


def sample_lines(sample: Sample) -> list[str]:
    """Where a sample lies, and its text with unprintable characters replaced."""
    source = "" if sample.source is None else f" of source {sample.source}"
    # Data may hold escape sequences, which must not reach the terminal.
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in sample.text)
    return [
        f"--- {len(sample.ids)} tokens from {sample.position:,}: document {sample.document:,}"
        f"{source}, its token {sample.offset:,} of {sample.length:,} ---",
        text,
        "---",
    ]


def plot_lengths(lengths: Tokens, title: str, target: str | Path) -> None:
    """Write the length histogram as a PNG file.

    Raises:
        UserError: no matplotlib, another ending than .png, or a place that cannot be written.
    """
    target = Path(target)
    if target.suffix.lower() != ".png":
        raise UserError(f"--plot {target}: the picture is a PNG; give a name that ends in .png")
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise UserError(
            '--plot needs matplotlib; run pip install "mamba3-lite[plots]"'
        ) from problem
    bins = length_bins(lengths)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(
        [low for low, _, _ in bins], [count for _, _, count in bins],
        width=[high + 1 - low for low, high, _ in bins], align="edge", edgecolor="white",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of a document, EOS included", ylabel="documents", title=title)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        figure.savefig(temporary, dpi=130, format="png")
        temporary.replace(target)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise UserError(f"--plot {target}: cannot be written ({problem.strerror})") from problem
