"""`mamba3-lite prepare`: local text and JSON-lines files to memory-mapped token shards.

`out/train` (and `out/val` when `val_fraction` > 0) are folders of shards; `out/prepare.json` holds
the settings and the counts. `out` appears by one rename when everything is written.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mamba3_lite.data.shards import (
    DEFAULT_SHARD_SIZE_TOKENS,
    ShardWriter,
    atomic_folder,
    open_shards,
    write_json,
)
from mamba3_lite.data.sources import InvalidUtf8, Piece, SourceReader, list_files
from mamba3_lite.data.tokenizer import Tokenizer, load_tokenizer
from mamba3_lite.errors import UserError

REPORT = "prepare.json"

# Raised when the same settings would give other bytes, so that old output is not taken for new.
_OUTPUT_VERSION = 1
_BATCH_CHARS = 1 << 21
_BATCH_PIECES = 1024


@dataclass
class PrepareReport:
    """What `prepare` wrote. Tokens include one EOS per document; bytes are UTF-8 bytes of text."""

    train_path: str
    val_path: str | None
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    val_documents: int = 0
    val_tokens: int = 0
    shards: int = 0
    repaired: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    already_prepared: bool = False

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token."""
        return self.text_bytes / self.tokens


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    text_field: str = "text",
    val_fraction: float = 0.0,
    shard_size_tokens: int = DEFAULT_SHARD_SIZE_TOKENS,
    max_tokens: int | None = None,
    invalid_utf8: InvalidUtf8 = "replace",
    suffixes: Sequence[str] | None = None,
    force: bool = False,
    log: Callable[[str], None] = print,
    progress: bool = True,
) -> PrepareReport:
    """Write the documents of `inputs` (files and folders) as shards under `out/train`, `out/val`.

    Each document is followed by one EOS. A document goes to validation by the hash of its text (of
    its first 65,536 characters), so the split is stable and equal texts stay together.
    `max_tokens` bounds train and validation together: the document that reaches it is cut so that
    its EOS still fits. Blank documents and bad records are skipped and counted; a JSON-lines file
    without `text_field` in any record is refused. `invalid_utf8` says what happens to invalid
    UTF-8, lone surrogates ("replace" by U+FFFD, "skip", "fail") and broken JSON lines (skipped,
    or "fail"). A finished `out` with the same settings and unchanged inputs is returned as it is;
    any other is refused, unless `force`. `UserError` leaves nothing behind.
    """
    _check_options(val_fraction, shard_size_tokens, max_tokens, invalid_utf8)
    out = Path(out)
    files = list_files(inputs, suffixes)
    encoder = load_tokenizer(tokenizer)
    settings = {
        "output_version": _OUTPUT_VERSION,
        "inputs": [_identity(path) for path in files],
        "tokenizer": [tokenizer, encoder.fingerprint],
        "text_field": text_field,
        "val_fraction": val_fraction,
        "shard_size_tokens": shard_size_tokens,
        "max_tokens": max_tokens,
        "invalid_utf8": invalid_utf8,
    }
    finished = _finished(out, settings, force)
    if finished is not None:
        log(f"[prepare] {out}: already prepared with these settings ({finished.tokens:,} tokens)")
        return finished
    total_bytes = sum(path.stat().st_size for path in files)
    log(f"[prepare] {len(files):,} files, {total_bytes / 1e6:,.1f} MB -> {out}")
    reader = SourceReader(text_field=text_field, invalid_utf8=invalid_utf8, log=log)
    with atomic_folder(out, replace=force) as folder:
        with contextlib.ExitStack() as stack:
            packer = _Packer(stack, folder, encoder, val_fraction, shard_size_tokens, max_tokens)
            bar = stack.enter_context(_progress_bar(total_bytes, progress))
            for batch in _batches(_all_pieces(reader, files)):
                ids = encoder.encode_batch([piece.text for piece in batch])
                for piece, piece_ids in zip(batch, ids, strict=True):
                    packer.add(piece, piece_ids)
                bar(reader.bytes_read, packer)
                if packer.full:
                    break
            packer.check(reader, files)
        report = packer.report(out, reader)
        # Relative paths: the folder may be moved, and equal runs give equal bytes.
        stored = asdict(report) | {"train_path": "train", "val_path": report.val_path and "val"}
        write_json(folder / REPORT, {"settings": settings, "report": stored})
    return report


class _Packer:
    """Deal documents out to the training and the validation writer, within the token budget."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        encoder: Tokenizer,
        val_fraction: float,
        shard_size_tokens: int,
        max_tokens: int | None,
    ) -> None:
        self.val_fraction = val_fraction
        self.max_tokens = max_tokens
        self.text_bytes = 0
        self.full = False
        self._eos_id = encoder.eos_id
        self._writers = [
            stack.enter_context(
                ShardWriter(
                    folder / name,
                    vocab_size=encoder.vocab_size,
                    eos_id=encoder.eos_id,
                    tokenizer_name=encoder.name,
                    tokenizer_fingerprint=encoder.fingerprint,
                    shard_size_tokens=shard_size_tokens,
                )
            )
            for name in (("train", "val") if val_fraction > 0 else ("train",))
        ]
        self._writer = self._writers[0]

    @property
    def documents(self) -> int:
        return sum(writer.n_documents for writer in self._writers)

    @property
    def tokens(self) -> int:
        return sum(writer.n_tokens for writer in self._writers)

    def add(self, piece: Piece, ids: list[int]) -> None:
        """Append one piece, and the EOS where its document ends or the budget does."""
        if self.full:
            return
        raw = piece.text.encode("utf-8")
        ends = piece.ends
        if self.max_tokens is not None:
            room = self.max_tokens - self.tokens
            # The next document needs a token and its EOS.
            self.full = len(ids) + ends >= room - 1
            if len(ids) + 1 >= room:
                ids, ends = ids[: room - 1], True
        if piece.starts:
            self._writer = self._writers[self._in_validation(raw)]
        self._writer.append([*ids, self._eos_id] if ends else ids, documents=int(ends))
        self.text_bytes += len(raw)

    def check(self, reader: SourceReader, files: Sequence[Path]) -> None:
        """Refuse a result without documents, in total or in one of the splits."""
        if not self.documents:
            skipped = ", ".join(f"{n} {reason}" for reason, n in reader.skipped.items())
            more = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
            raise UserError(
                f"{files[0]}{more}: holds no document with text (skipped: {skipped or 'none'}); "
                "name files that hold text"
            )
        for writer in self._writers:
            if not writer.n_documents:
                raise UserError(
                    f"val_fraction {self.val_fraction}: of {self.documents} documents none falls "
                    f"into {writer.folder.name}; change the fraction or add documents"
                )

    def report(self, out: Path, reader: SourceReader) -> PrepareReport:
        val = self._writers[1] if len(self._writers) > 1 else None
        return PrepareReport(
            train_path=str(out / "train"),
            val_path=str(out / "val") if val else None,
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            val_documents=val.n_documents if val else 0,
            val_tokens=val.n_tokens if val else 0,
            shards=sum(len(writer.manifest["shards"]) for writer in self._writers),
            repaired=reader.repaired,
            skipped=dict(reader.skipped),
        )

    def _in_validation(self, raw: bytes) -> bool:
        digest = hashlib.blake2b(raw, digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.val_fraction * 2**64


def _check_options(
    val_fraction: float, shard_size_tokens: int, max_tokens: int | None, invalid_utf8: str
) -> None:
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction must be at least 0 and below 1, not {val_fraction}")
    if shard_size_tokens < 1:
        raise UserError(f"shard_size_tokens must be at least 1, not {shard_size_tokens}")
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"max_tokens must be at least 2 (a token and its EOS), not {max_tokens}")
    policies = get_args(InvalidUtf8)
    if invalid_utf8 not in policies:
        raise UserError(f"invalid_utf8 must be one of {', '.join(policies)}, not {invalid_utf8!r}")


def _identity(path: Path) -> list[Any]:
    """What tells an input from another or a changed one without reading it."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def _finished(out: Path, settings: dict[str, Any], force: bool) -> PrepareReport | None:
    """The report of an earlier, equal run; None when there is work to do."""
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return None
        stored = json.loads((out / REPORT).read_text(encoding="utf-8"))
        report = PrepareReport(**stored["report"])
        differing = [key for key in settings if stored["settings"].get(key) != settings[key]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        # --force must never delete a folder that prepare did not write.
        raise UserError(
            f"{out}: is not empty and no readable output of prepare; choose another folder"
        ) from exc
    if force:
        return None
    if differing:
        raise UserError(
            f"{out}: already holds data prepared otherwise (differs in: {', '.join(differing)}); "
            "choose another folder, or replace it with --force"
        )
    report.train_path = str(out / "train")
    report.val_path = str(out / "val") if report.val_path else None
    try:
        for path in filter(None, (report.train_path, report.val_path)):
            open_shards(path)
    except UserError as exc:
        raise UserError(f"{exc} (replace {out} with --force)") from exc
    report.already_prepared = True
    return report


def _all_pieces(reader: SourceReader, files: Iterable[Path]) -> Iterator[Piece]:
    for path in files:
        yield from reader.read(path)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces so that the tokenizer's threads have work and memory stays flat."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _progress_bar(total_bytes: int, wanted: bool) -> Iterator[Callable[[int, _Packer], None]]:
    """Yield a function (bytes read, packer) that draws the bar when stderr is a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield lambda bytes_read, packer: None
        return
    bar = Progress(
        TextColumn("prepare"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%  {task.fields[rates]}  left"),
        TimeRemainingColumn(),
        console=console,
    )
    begun = time.monotonic()
    with bar:
        task = bar.add_task("prepare", total=total_bytes, rates="")

        def update(bytes_read: int, packer: _Packer) -> None:
            seconds = max(time.monotonic() - begun, 1e-9)
            rates = (
                f"{packer.documents / seconds:,.0f} documents/s  "
                f"{bytes_read / 1e6 / seconds:,.2f} MB/s  {packer.tokens / seconds:,.0f} tokens/s"
            )
            bar.update(task, completed=bytes_read, rates=rates)

        yield update


def prepare_command(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Text files, .jsonl files, and folders (read in sorted order)."),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", help="Folder to make: train/, val/ and prepare.json.")
    ],
    tokenizer: Annotated[
        str, typer.Option(help="'gpt2' (built in), or the path of a tokenizer.json.")
    ] = "gpt2",
    text_field: Annotated[
        str, typer.Option(help="Field of a JSON-lines record that holds the text.")
    ] = "text",
    val_fraction: Annotated[
        float, typer.Option(help="Share of the documents that goes to OUT/val.")
    ] = 0.0,
    shard_size_tokens: Annotated[
        int, typer.Option(help="Tokens per shard file.")
    ] = DEFAULT_SHARD_SIZE_TOKENS,
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop at this many tokens, train and val together.")
    ] = None,
    invalid_utf8: Annotated[
        str, typer.Option(help="Invalid UTF-8 and broken JSON lines: replace, skip or fail.")
    ] = "replace",
    suffix: Annotated[
        list[str] | None,
        typer.Option(help="Read files with this ending instead of the usual ones; repeatable."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an OUT that an earlier prepare wrote.")
    ] = False,
) -> None:
    """Turn text and JSON-lines files into token shards for pretraining.

    Reads .txt, .md, .rst, .py (one document a file) and .jsonl (one document a record).

    Example: mamba3-lite prepare notes/ corpus.jsonl --out data/mine --val-fraction 0.01
    """
    report = prepare(
        inputs,
        out,
        tokenizer=tokenizer,
        text_field=text_field,
        val_fraction=val_fraction,
        shard_size_tokens=shard_size_tokens,
        max_tokens=max_tokens,
        # typer before 0.19 knows no Literal; prepare checks the value.
        invalid_utf8=cast(InvalidUtf8, invalid_utf8),
        suffixes=suffix or None,
        force=force,
    )
    Console().print(_summary(report))


def _summary(report: PrepareReport) -> Table:
    table = Table("prepared", "", show_header=False)
    rows = {
        "train": report.train_path,
        "validation": report.val_path or "none",
        "documents": f"{report.documents:,} ({report.val_documents:,} in validation)",
        "tokens": f"{report.tokens:,} ({report.val_tokens:,} in validation)",
        "bytes per token": f"{report.bytes_per_token:.2f}",
        "shards": f"{report.shards:,}",
        "documents repaired": f"{report.repaired:,}",
        "skipped": ", ".join(f"{n:,} {reason}" for reason, n in report.skipped.items()) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
