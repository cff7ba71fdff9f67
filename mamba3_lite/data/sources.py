"""Documents out of files and data sets, as one resumable stream of records a source.

A text file is one record, a JSON line is one, a row of a Parquet file or of a data set is one, and
so is what lies between two EOS ids of a token file. Nothing larger than a record is held, and only
plain text files above 64 MiB are split (at blank lines), so memory does not grow with the input.
"""

import codecs
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, get_args

from mamba3_lite.data.records import (
    MEND,
    InvalidUtf8,
    Mended,
    Problem,
    Raw,
    Reader,
    Record,
    Source,
    SourceConfig,
    extra_missing,
    finished,
    is_missing,
    joined_text,
    lookup,
    mend,
    text_record,
    wrong_field,
)
from mamba3_lite.data.source_ids import TorchReader, Uint32Reader
from mamba3_lite.data.source_tables import HubSource, ParquetReader
from mamba3_lite.errors import UserError, reading
from mamba3_lite.schema import nearest

KINDS = ("auto", "text", "jsonl", "parquet", "hf", "raw_uint32", "torch")

_JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
_PARQUET_SUFFIXES = (".parquet",)
_TOKEN_SUFFIXES = (".bin", ".pt")
_SUFFIXES = {
    "text": (".txt", ".md", ".rst", ".py"),
    "jsonl": _JSONL_SUFFIXES,
    "parquet": _PARQUET_SUFFIXES,
    "raw_uint32": (".bin", ".u32", ".uint32"),
    "torch": _TOKEN_SUFFIXES,
}
_SUFFIXES["auto"] = (*_SUFFIXES["text"], *_JSONL_SUFFIXES, *_PARQUET_SUFFIXES)

_LARGE_BYTES = 64 << 20
_PIECE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 16
# Binary files show it early; reading on would only make text files slower.
_PROBE_BYTES = 8_192
_ZIP_MAGIC = b"PK\x03\x04"


def open_source(config: SourceConfig, *, invalid_utf8: InvalidUtf8 = "replace") -> Source:
    """The source that the settings name, checked as far as can be without reading it all.

    `UserError`: an unknown kind, a missing path, a wrong ending, a field that no record of a file
    has, a data set that cannot be reached, a package that is not installed.
    """
    if config.kind not in KINDS:
        known = nearest(config.kind, KINDS) or f" (kinds: {', '.join(KINDS)})"
        raise UserError(f"source {config.name!r}: unknown kind {config.kind!r}{known}")
    if invalid_utf8 not in get_args(InvalidUtf8):
        policies = ", ".join(get_args(InvalidUtf8))
        raise UserError(f"invalid_utf8 must be one of {policies}, not {invalid_utf8!r}")
    if config.kind == "hf" and config.paths:
        raise UserError(
            f"source {config.name!r}: kind hf reads no paths; remove them, or set kind to what "
            "the files are (text, jsonl, parquet)"
        )
    if config.kind == "hf" or (config.kind == "auto" and config.dataset and not config.paths):
        return HubSource(config, invalid_utf8)
    files = _list_files(config)
    readers = [_reader_of(path, config)(path, config, invalid_utf8) for path in files]
    for reader in readers:
        with reading(str(reader.path), "check its permissions"):
            reader.check()
    return FilesSource(config, readers)


class FilesSource(Source):
    """The records of files, one file after the other."""

    def __init__(self, config: SourceConfig, readers: Sequence[Reader]) -> None:
        super().__init__(config)
        self._readers = readers

    def fingerprint(self) -> str:
        entries = []
        for reader in self._readers:
            with reading(str(reader.path), "put it back"):
                stat = reader.path.stat()
            entries.append([str(reader.path.resolve()), stat.st_size, stat.st_mtime_ns])
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def total_bytes(self) -> int:
        return sum(reader.size for reader in self._readers)

    def records(self, start: int = 0) -> Iterator[Record]:
        first = done = self.bytes_read = 0
        for reader in self._readers:
            reader.position = 0
            count = reader.count()
            if count is not None and first + count <= start:
                first += count
            else:
                last = -1
                with reading(str(reader.path), "check the file and its permissions"):
                    for last, raw in reader.raw(max(0, start - first)):
                        self.bytes_read = done + reader.position
                        if first + last >= start:
                            yield finished(first + last, raw, reader.parse)
                first += last + 1
            done += reader.size
            self.bytes_read = done


class TextReader(Reader):
    """A file of text is one record; above 64 MiB it is several, cut at blank lines."""

    def count(self) -> int | None:
        return 1 if self.size <= _LARGE_BYTES else None

    def raw(self, skip: int) -> Iterator[tuple[int, Raw]]:
        with self.path.open("rb") as file:
            if self.size <= _LARGE_BYTES:
                content = file.read()
                self.position = len(content)
                yield 0, Raw(str(self.path), (1, content), len(content))
                return
            line = 1
            for number, piece in enumerate(_pieces(file)):
                self.position += len(piece)
                yield number, Raw(f"{self.path}:{line}", (line, piece), len(piece))
                if number == 0 and _is_binary(piece):
                    return
                line += piece.count(b"\n")

    def parse(self, ordinal: int, raw: Raw) -> Record:
        line, content = raw.content
        if _is_binary(content):
            raise Problem("binary", "not text (it holds zero bytes)")
        if line == 1:
            content = content.removeprefix(codecs.BOM_UTF8)

        def locate(offset: int) -> str:
            passed = content.count(b"\n", 0, offset)
            return f"{self.path}:{line + passed}"

        mended = mend(content, self.policy, locate)
        return text_record(ordinal, raw, mended.text, mended)


class JsonLinesReader(Reader):
    """Each line that is not blank is a record; .gz and .zst are decompressed on the way."""

    def check(self) -> None:
        fields = self.config.text_fields
        seen: dict[str, None] = {}
        for _, raw in self.raw(0):
            try:
                row, _ = self._row(raw)
            except Problem:
                continue
            if not any(is_missing(lookup(row, field)) for field in fields):
                return
            seen.update(dict.fromkeys(map(str, row)))
        if seen:
            raise wrong_field(str(self.path), fields, list(seen))

    def raw(self, skip: int) -> Iterator[tuple[int, Raw]]:
        with self.path.open("rb") as file:
            number = 0
            try:
                for line_number, line in enumerate(_decompressed(self.path, file), start=1):
                    self.position = file.tell()
                    if line_number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line and not line.isspace():
                        yield number, Raw(f"{self.path}:{line_number}", line, len(line))
                        number += 1
            except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
                raise UserError(
                    f"{self.path}: damaged or cut short ({exc}); copy the file anew"
                ) from exc

    def parse(self, ordinal: int, raw: Raw) -> Record:
        row, line = self._row(raw)
        text = joined_text(row, self.config.text_fields)
        # Valid UTF-8 holds no surrogate, but JSON can spell a lone one in plain ASCII.
        if b"\\ud" in raw.content or b"\\uD" in raw.content:
            mended = mend(text, self.policy, lambda _: raw.origin)
            return text_record(ordinal, raw, mended.text, mended if mended.flaw else line)
        return text_record(ordinal, raw, text, line)

    def _row(self, raw: Raw) -> tuple[dict[str, Any], Mended]:
        """The JSON object of a line, and the line."""
        line = mend(raw.content, self.policy, lambda _: raw.origin)
        try:
            row = json.loads(line.text)
        except (ValueError, RecursionError) as exc:
            if self.policy == "fail":
                raise UserError(f"{raw.origin}: broken JSON ({exc}); {MEND}") from exc
            raise Problem("broken_json", f"broken JSON ({exc})") from exc
        if not isinstance(row, dict):
            raise Problem("not_an_object", "not a JSON object")
        return row, line


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a file of zstd frames; `EOFError` when the last one is cut short."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as exc:
            raise extra_missing(str(path), "zstandard", "zstd") from exc
        self._path = path
        self._file = file
        # Frames may ask for windows up to this; the library's own limit refuses `zstd --long=31`.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._error = zstandard.ZstdError
        self._blocks = self._decompress()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self) -> Iterator[bytes]:
        frame = None
        while block := self._file.read(_BLOCK_BYTES):
            while block:
                frame = frame or self._decompressor.decompressobj()
                try:
                    yield frame.decompress(block)
                except self._error as exc:
                    raise EOFError(str(exc)) from exc
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("the file ends inside a zstd frame")


def _decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), _BLOCK_BYTES)  # type: ignore[arg-type]
    if suffix == ".zst":
        return io.BufferedReader(_ZstdStream(path, file), _BLOCK_BYTES)
    return file


def _is_binary(content: bytes) -> bool:
    return b"\0" in content[:_PROBE_BYTES]


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a large text file in pieces of about `_PIECE_BYTES`."""
    buffer = b""
    while block := file.read(_PIECE_BYTES):
        buffer += block
        cut = _cut(buffer)
        yield buffer[:cut]
        buffer = buffer[cut:]
    if buffer:
        yield buffer


def _cut(buffer: bytes) -> int:
    """Where to cut: after the last blank line, else after the last line, else between characters.

    Only the second half is searched, so that what is left over cannot pile up.
    """
    for end in (b"\n\n", b"\n\r\n", b"\n"):
        found = buffer.rfind(end, len(buffer) // 2)
        if found >= 0:
            return found + len(end)
    cut = len(buffer)
    # Bytes 10xxxxxx continue a character; no character has more than three of them.
    while cut > len(buffer) - 4 and buffer[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1


def _list_files(config: SourceConfig) -> list[Path]:
    """The files to read: those named, and those of each named folder in sorted order.

    Hidden files and folders are left out. A file reached twice counts once.
    """
    accepted = _accepted(config)
    if not config.paths:
        raise UserError(
            f"source {config.name!r}: no input; give it paths (files or folders) or a dataset"
        )
    files: dict[str, Path] = {}
    for given in map(Path, config.paths):
        try:
            given.stat()
        except OSError as exc:
            missing = isinstance(exc, FileNotFoundError)
            reason = "no such file or folder" if missing else exc.strerror
            raise UserError(f"{given}: {reason}; check the path") from exc
        if given.is_dir():
            found = [path for path in _walk(given) if _fits(path, config, accepted)]
            if not found:
                raise UserError(f"{given}: no file ending in {', '.join(accepted)} in this folder")
        elif not _named_fits(given, config, accepted):
            raise UserError(
                f"{given}: cannot read files ending in {given.suffix!r}; accepted are "
                f"{', '.join(accepted)} (name another ending with suffixes or --suffix, and "
                "what it holds with kind)"
            )
        else:
            found = [given]
        for path in found:
            files.setdefault(os.path.realpath(path), path)
    return list(files.values())


def _accepted(config: SourceConfig) -> tuple[str, ...]:
    if not config.suffixes:
        return _SUFFIXES[config.kind]
    names = [name.lower().lstrip(".") for name in config.suffixes]
    if "" in names:
        raise UserError("suffixes: name at least one file ending, such as .txt")
    return tuple(dict.fromkeys(name if name == "*" else f".{name}" for name in names))


def _ends_in(path: Path, suffixes: Iterable[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes)) or "*" in suffixes


def _fits(path: Path, config: SourceConfig, accepted: tuple[str, ...]) -> bool:
    """Whether a file of a folder is read. A folder of tensors is known by its `shard_*.bin`."""
    if config.suffixes or config.kind not in ("auto", "torch"):
        return _ends_in(path, accepted)
    is_shard = path.name.startswith("shard_") and path.suffix == ".bin"
    return is_shard or (config.kind == "auto" and _ends_in(path, accepted))


def _named_fits(path: Path, config: SourceConfig, accepted: tuple[str, ...]) -> bool:
    """Whether a file that was named is read."""
    return _ends_in(path, accepted) or (
        config.kind == "auto" and not config.suffixes and _ends_in(path, _TOKEN_SUFFIXES)
    )


def _walk(folder: Path) -> Iterator[Path]:
    # Without a handler os.walk leaves out a folder that it cannot list and says nothing.
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _refuse_folder(exc: OSError) -> None:
    raise UserError(f"{exc.filename}: cannot list this folder ({exc.strerror})") from exc


_READERS: dict[str, type[Reader]] = {
    "text": TextReader,
    "jsonl": JsonLinesReader,
    "parquet": ParquetReader,
    "raw_uint32": Uint32Reader,
    "torch": TorchReader,
}


def _reader_of(path: Path, config: SourceConfig) -> type[Reader]:
    """The reader of the kind that was set or, with "auto", of the file's ending."""
    if config.kind != "auto":
        return _READERS[config.kind]
    for kind in ("jsonl", "parquet"):
        if _ends_in(path, _SUFFIXES[kind]):
            return _READERS[kind]
    if not _ends_in(path, _TOKEN_SUFFIXES):
        return TextReader
    with reading(str(path), "check its permissions"), path.open("rb") as file:
        if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            return TorchReader
    raise UserError(
        f"{path}: no torch.save'd tensor; if it holds EOS-separated uint32 token records, set "
        "kind: raw_uint32"
    )
