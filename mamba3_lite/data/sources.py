"""Documents out of local files, as a stream of short pieces.

A text file is one document; each record of a JSON-lines file is one. Every byte is read once or
twice and nothing larger than a line or a piece is held, so memory does not grow with the input.
"""

import codecs
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from mamba3_lite.data.tokenizer import split_text
from mamba3_lite.errors import UserError

InvalidUtf8 = Literal["replace", "skip", "fail"]

JSONL_SUFFIX = ".jsonl"
DEFAULT_SUFFIXES = (".txt", ".md", ".rst", ".py", JSONL_SUFFIX)

_MEND = "repair the file, or use --invalid-utf8 replace (or skip)"
_SURROGATE = re.compile("[\ud800-\udfff]")
_READ_BYTES = 1 << 20
_MAX_LOGGED = 10
_MAX_FIELDS_NAMED = 12


class Piece(NamedTuple):
    """A part of a document; most documents are one piece that both starts and ends."""

    text: str
    starts: bool
    ends: bool


def list_files(inputs: Sequence[str | Path], suffixes: Iterable[str] | None = None) -> list[Path]:
    """The files to read: those given, and those of each given folder in sorted order.

    `suffixes` (default `DEFAULT_SUFFIXES`) says which files of a folder are taken; hidden files and
    folders are not. A file reached twice counts once. `UserError`: no input, a missing path, a
    named file with another suffix, a folder without any fitting file.
    """
    accepted = _normalise(suffixes)
    if not inputs:
        raise UserError("no input: name at least one file or folder")
    files: dict[str, Path] = {}
    for given in map(Path, inputs):
        try:
            given.stat()
        except OSError as exc:
            missing = isinstance(exc, FileNotFoundError)
            reason = "no such file or folder" if missing else exc.strerror
            raise UserError(f"{given}: {reason}; check the path") from exc
        if given.is_dir():
            found = [path for path in _walk(given) if path.suffix.lower() in accepted]
            if not found:
                raise UserError(f"{given}: no file ending in {', '.join(accepted)} in this folder")
        elif given.suffix.lower() not in accepted:
            raise UserError(
                f"{given}: cannot read files ending in {given.suffix!r}; accepted are "
                f"{', '.join(accepted)} (for other text files name their ending with --suffix)"
            )
        else:
            found = [given]
        for path in found:
            files.setdefault(os.path.realpath(path), path)
    return list(files.values())


class SourceReader:
    """Turn files into pieces, and count what was skipped or repaired.

    `skipped` counts records and files left out, by reason; `repaired` counts documents in which
    invalid text became U+FFFD; `bytes_read` is the position in the whole input. Under "fail",
    invalid UTF-8, a lone surrogate or a broken JSON line is a `UserError` naming file and line.
    """

    def __init__(
        self, *, text_field: str, invalid_utf8: InvalidUtf8, log: Callable[[str], None]
    ) -> None:
        self.text_field = text_field
        self.invalid_utf8 = invalid_utf8
        self.skipped: Counter[str] = Counter()
        self.repaired = 0
        self.bytes_read = 0
        self._log = log
        self._logged = 0

    def read(self, path: Path) -> Iterator[Piece]:
        """The pieces of one file, in order."""
        try:
            with path.open("rb") as file:
                if path.suffix.lower() == JSONL_SUFFIX:
                    yield from self._read_jsonl(path, file)
                else:
                    yield from self._read_text(path, file)
        except OSError as exc:
            raise UserError(f"{path}: cannot read it ({exc.strerror})") from exc

    def _read_text(self, path: Path, file: BinaryIO) -> Iterator[Piece]:
        start = self.bytes_read
        # A first pass decides about the whole document before any part of it is passed on.
        bad_line, blank = _scan_text(file)
        if bad_line is not None and not self._tolerates(f"{path}:{bad_line}", "invalid UTF-8"):
            pass
        elif blank:
            self._skip("empty", str(path), "no text")
        else:
            file.seek(0)
            buffer, starts = "", True
            for text in _decoded(file):
                buffer += text
                *whole, buffer = split_text(buffer)
                for piece in whole:
                    yield Piece(piece, starts, False)
                    starts = False
                self.bytes_read = start + file.tell()
            yield Piece(buffer, starts, True)
        self.bytes_read = start + path.stat().st_size

    def _read_jsonl(self, path: Path, file: BinaryIO) -> Iterator[Piece]:
        fields: dict[str, None] = {}
        found = False
        for number, raw in enumerate(file, start=1):
            self.bytes_read += len(raw)
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            record = self._parse(raw, where)
            if isinstance(record, dict):
                found = found or self.text_field in record
                if len(fields) < _MAX_FIELDS_NAMED:
                    fields.update(dict.fromkeys(record))
            text = self._text_of(record, where)
            if text is not None:
                pieces = list(split_text(text))
                last = len(pieces) - 1
                for i, piece in enumerate(pieces):
                    yield Piece(piece, i == 0, i == last)
        if fields and not found:
            seen = ", ".join(list(fields)[:_MAX_FIELDS_NAMED])
            raise UserError(
                f"{path}: no record has the field {self.text_field!r} (fields seen: {seen}); "
                "name the right one with --text-field"
            )

    def _parse(self, raw: bytes, where: str) -> Any:
        """The JSON value of a line; None when it is skipped (and for a bare null)."""
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError:
            if not self._tolerates(where, "invalid UTF-8"):
                return None
            line = raw.decode("utf-8", "replace")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as exc:
            if self.invalid_utf8 == "fail":
                raise UserError(f"{where}: broken JSON ({exc}); {_MEND}") from exc
            self._skip("broken_json", where, f"broken JSON ({exc})")
            return None
        if not isinstance(record, dict):
            self._skip("not_an_object", where, "not a JSON object")
        return record

    def _text_of(self, record: Any, where: str) -> str | None:
        if not isinstance(record, dict):
            return None
        if self.text_field not in record:
            self._skip("missing_field", where, f"no field {self.text_field!r}")
            return None
        text = record[self.text_field]
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            self._skip("not_text", where, f"field {self.text_field!r} is {kind}, not a string")
            return None
        if _SURROGATE.search(text):
            if not self._tolerates(where, "lone surrogate"):
                return None
            text = _SURROGATE.sub("\ufffd", text)
        if not text.strip():
            self._skip("empty", where, "no text")
            return None
        return text

    def _tolerates(self, where: str, problem: str) -> bool:
        """Apply the policy to invalid Unicode: True to repair the document, False to skip it."""
        if self.invalid_utf8 == "fail":
            raise UserError(f"{where}: {problem}; {_MEND}")
        if self.invalid_utf8 == "skip":
            self._skip("invalid_utf8", where, problem)
            return False
        self.repaired += 1
        self._report(f"{where}: {problem}; replaced by U+FFFD")
        return True

    def _skip(self, reason: str, where: str, detail: str) -> None:
        self.skipped[reason] += 1
        self._report(f"{where}: {detail}; skipped")

    def _report(self, message: str) -> None:
        self._logged += 1
        if self._logged <= _MAX_LOGGED:
            self._log(f"[prepare] {message}")
        elif self._logged == _MAX_LOGGED + 1:
            self._log("[prepare] further problems are only counted")


def _normalise(suffixes: Iterable[str] | None) -> tuple[str, ...]:
    if suffixes is None:
        return DEFAULT_SUFFIXES
    names = [name.lower() if name.startswith(".") else f".{name.lower()}" for name in suffixes]
    if not names or "." in names:
        raise UserError("suffixes: name at least one file ending, such as .txt")
    return tuple(dict.fromkeys(names))


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


def _scan_text(file: BinaryIO) -> tuple[int | None, bool]:
    """(line of the first invalid byte or None, whether there is nothing but white space)."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines, blank = 1, True
    while True:
        raw = file.read(_READ_BYTES)
        try:
            text = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as exc:
            return lines + exc.object[: exc.start].count(b"\n"), False
        blank = blank and not text.strip()
        lines += text.count("\n")
        if not raw:
            return None, blank


def _decoded(file: BinaryIO) -> Iterator[str]:
    """The text of a file in blocks, invalid bytes as U+FFFD, line ends as they are."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    while raw := file.read(_READ_BYTES):
        yield decoder.decode(raw)
    yield decoder.decode(b"", final=True)
