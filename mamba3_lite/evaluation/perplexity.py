"""Perplexity: nat per token, bits per byte, and what a longer context is worth.

Every token of the documents is predicted once, their EOS included, the very first from an EOS.
"""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mamba3_lite.errors import UserError
from mamba3_lite.evaluation.corpus import Corpus, Document
from mamba3_lite.evaluation.progress import progress_bar
from mamba3_lite.evaluation.scoring import Passage, Scored, Scorer

# Contexts of 2^(k - 1) + 1 to 2^k tokens share bucket k, so that a window of 2^k ends with one.
_BUCKETS = 48
_LARGEST_EXPONENT = math.log(1e300)


@dataclass(frozen=True)
class Mode:
    """How documents are read.

    Attributes:
        window: tokens of a window over the stream of documents; None: each document alone, from
            an empty state to its end.
        stride: by how much a window moves on; only what is new in it is scored.
    """

    window: int | None = None
    stride: int = 0

    @property
    def words(self) -> str:
        """The mode in words."""
        if self.window is None:
            return "whole documents"
        moved = "" if self.stride == self.window else f", stride {self.stride:,}"
        return f"windows of {self.window:,}{moved}"

    @property
    def context(self) -> str:
        """What a token is predicted from."""
        if self.window is None:
            return "an EOS and all of its document before it"
        least = self.window - self.stride + 1
        return f"{least:,} to {self.window:,} tokens before it (at the start what there is)"

    def passages(self, documents: Iterable[Document], eos_id: int) -> Iterator[Passage]:
        """The documents cut so that each token is scored once."""
        if self.window is not None:
            yield from _windows(documents, eos_id, self.window, self.stride)
            return
        for document in documents:
            yield Passage(np.concatenate([[eos_id], document.ids]), 1)


def windowed(window: int, stride: int | None = None) -> Mode:
    """``UserError`` for sizes that mean nothing; the stride is the window unless given."""
    if window < 1:
        raise UserError(f"--window must be 1 or more, got {window}.")
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise UserError(f"--stride must lie between 1 and --window ({window}), got {stride}.")
    return Mode(window, stride)


def _windows(
    documents: Iterable[Document], eos_id: int, window: int, stride: int
) -> Iterator[Passage]:
    """Windows over an EOS and all documents behind it: ``window`` inputs, ``window`` targets."""
    stream, first = np.array([eos_id]), 1
    for document in documents:
        stream = np.concatenate([stream, document.ids])
        while len(stream) > window:
            yield Passage(stream[: window + 1], first)
            stream, first = stream[stride:], window - stride + 1
    if len(stream) > first:
        yield Passage(stream, first)


class _Read:
    """Documents as they are, counted."""

    def __init__(self, documents: Iterable[Document]):
        self._documents = documents
        self.documents = self.size_bytes = 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self.documents += 1
            self.size_bytes += document.size_bytes
            yield document


class _Tally:
    """Float64 sums over scored tokens, by how many tokens each was predicted from."""

    def __init__(self, eos_id: int):
        self.eos_id = eos_id
        self.counts = np.zeros(_BUCKETS, np.int64)
        self.sums, self.squares = np.zeros((2, _BUCKETS))
        self.eos_count, self.eos_sum = 0, 0.0

    def add(self, part: Scored) -> None:
        context = part.begin + np.arange(len(part.ids))
        bucket = np.frexp(context - 1)[1]
        self.counts += np.bincount(bucket, minlength=_BUCKETS)
        self.sums += np.bincount(bucket, part.losses, _BUCKETS)
        self.squares += np.bincount(bucket, part.losses**2, _BUCKETS)
        ends = part.ids == self.eos_id
        self.eos_count += int(ends.sum())
        self.eos_sum += float(part.losses[ends].sum())

    def by_context(self) -> list[dict[str, Any]]:
        """A row for each bucket that holds a token."""
        rows = []
        for k in np.flatnonzero(self.counts).tolist():
            count, mean = int(self.counts[k]), float(self.sums[k] / self.counts[k])
            variance = max(0.0, float(self.squares[k]) / count - mean**2)
            error = math.sqrt(variance / (count - 1)) if count > 1 else None
            rows.append(
                {
                    "from": 2**k // 2 + 1, "to": 2**k, "tokens": count, "loss": mean,
                    "standard_error": error,
                }
            )  # fmt: skip
        return rows


def measure(
    scorer: Scorer, corpus: Corpus, mode: Mode, *, limit: int | None = None
) -> dict[str, Any]:
    """Scores all documents of a corpus, or its first ``limit``; the result is ready for JSON.

    ``loss`` and ``perplexity`` are means over all tokens, EOS included, as in training.
    ``bits_per_byte`` leaves the EOS out, which is no part of the text.

    Raises:
        UserError: no text, a text that cannot be read, or logits that are not finite.
    """
    read = _Read(itertools.islice(corpus.documents(), limit))
    tally, begun = _Tally(corpus.eos_id), time.perf_counter()
    total = corpus.tokens if limit is None else None
    with progress_bar(f"{corpus.name}, {mode.words}", total, unit="tokens") as advance:
        for part in scorer.score(mode.passages(read, corpus.eos_id)):
            tally.add(part)
            advance(len(part.ids))
    if not read.size_bytes:
        raise UserError(f"{corpus.name}: holds no text; name other data.")
    seconds = time.perf_counter() - begun
    tokens, nats = int(tally.counts.sum()), float(tally.sums.sum())
    return {
        "data": corpus.name, **corpus.facts,
        "mode": mode.words, "window": mode.window, "stride": mode.stride or None,
        "context": mode.context, "documents": read.documents, "tokens": tokens,
        "bytes": read.size_bytes, "loss": nats / tokens,
        "perplexity": math.exp(min(nats / tokens, _LARGEST_EXPONENT)),
        "bits_per_byte": (nats - tally.eos_sum) / math.log(2) / read.size_bytes,
        "eos_tokens": tally.eos_count,
        "eos_loss": tally.eos_sum / tally.eos_count if tally.eos_count else None,
        "by_context": tally.by_context(),
        "seconds": round(seconds, 3), "tokens_per_sec": round(tokens / seconds),
    }  # fmt: skip


def save_picture(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """Loss by context as a PNG, a curve for each result; False, and no file, without matplotlib.

    Bands are two standard errors, as if tokens were independent of each other.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    several = len({result["data"] for result in results}) > 1
    for result in results:
        rows = result["by_context"]
        middle = [math.sqrt(row["from"] * row["to"]) for row in rows]
        loss = np.array([row["loss"] for row in rows])
        band = 2 * np.array([row["standard_error"] or 0.0 for row in rows])
        label = f"{result['data']}, {result['mode']}" if several else result["mode"]
        label = label.replace("$", r"\$")  # what stands between two is mathematics to matplotlib
        (line,) = axes.plot(middle, loss, marker=".", label=label)
        axes.fill_between(middle, loss - band, loss + band, color=line.get_color(), alpha=0.2, lw=0)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens read before (context)", ylabel="loss (nat per token)")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=130)
    return True
