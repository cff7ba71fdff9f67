"""What every kind of source shares: its settings, its records, and the rules for bad text."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mamba3_lite.errors import UserError

Ids = np.ndarray[Any, Any]
InvalidUtf8 = Literal["replace", "skip", "fail"]

MEND = "repair the file, or set invalid_utf8 (--invalid-utf8) to replace or skip"
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_FIELDS_NAMED = 12


@dataclass(frozen=True)
class SourceConfig:
    """One entry of `sources:`.

    `kind` "auto" goes by the files' endings, and to the Hugging Face `dataset` where no `paths` are
    given. `field` may be dotted (`a.b`); the texts of several `fields` are joined by a blank line.
    `suffixes` replace the endings that the kind takes; "*" takes every file.
    """

    name: str
    weight: float = 1.0
    kind: str = "auto"
    paths: tuple[str, ...] = ()
    field: str = "text"
    fields: tuple[str, ...] = ()
    dataset: str = ""
    subset: str = ""
    data_dir: str = ""
    split: str = "train"
    revision: str = "main"
    suffixes: tuple[str, ...] = ()
    eos_id: int = 50_256

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields that make the text of a record."""
        return self.fields or (self.field,)


class Record(NamedTuple):
    """One record of a source, good or bad, so that ordinals never shift.

    Either `text`, or `ids` (n,) uint32 without an EOS, or `problem` (a short key) is set. `origin`
    names file and line or row. `size_bytes` is the size of the record itself, decompressed.
    `repaired`: invalid Unicode became U+FFFD. `detail` says in words what was wrong.
    """

    ordinal: int
    origin: str
    text: str | None
    ids: Ids | None
    problem: str | None
    size_bytes: int
    repaired: bool = False
    detail: str = ""


class Raw(NamedTuple):
    """A record as it lies in its file, not yet looked into."""

    origin: str
    content: Any
    size_bytes: int


class Problem(Exception):
    """A record that gives no document; `origin` where it is known better than the record's."""

    def __init__(self, reason: str, detail: str, origin: str | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.origin = origin


class Source(ABC):
    """A stream of records that can be entered at any ordinal.

    `bytes_read` is how far `records` has come, in the unit of `total_bytes`.
    """

    bytes_read = 0

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal input: paths, sizes and times, or data set and revision."""

    @abstractmethod
    def total_bytes(self) -> int | None:
        """Bytes on disk; None where that is not known."""

    @abstractmethod
    def records(self, start: int = 0) -> Iterator[Record]:
        """All records in order, or those from ordinal `start` on.

        `UserError`: a file that cannot be read or is damaged; under invalid_utf8 "fail" also
        invalid UTF-8, a lone surrogate or broken JSON.
        """


class Mended(NamedTuple):
    """A text in valid Unicode; `flaw` says what was replaced in it, `origin` where."""

    text: str
    flaw: str
    origin: str


def mend(content: bytes | str, policy: InvalidUtf8, locate: Callable[[int], str]) -> Mended:
    """Apply the policy to invalid UTF-8 and lone surrogates; `locate` names the place of an offset.

    `UserError` under "fail", `Problem` under "skip".
    """
    if isinstance(content, bytes):
        try:
            return Mended(content.decode("utf-8"), "", "")
        except UnicodeDecodeError as exc:
            flaw, origin = "invalid UTF-8", locate(exc.start)
            text = content.decode("utf-8", "replace")
    else:
        # isascii is a flag of the string; the search reads it all.
        found = None if content.isascii() else _SURROGATE.search(content)
        if not found:
            return Mended(content, "", "")
        flaw, origin = "lone surrogate", locate(found.start())
        text = _SURROGATE.sub("\ufffd", content)
    if policy == "fail":
        raise UserError(f"{origin}: {flaw}; {MEND}")
    if policy == "skip":
        raise Problem("invalid_utf8", flaw, origin)
    return Mended(text, flaw, origin)


def text_record(ordinal: int, raw: Raw, text: str, mended: Mended | None = None) -> Record:
    """The record of a text; `Problem` when there is nothing but white space."""
    if not text.strip():
        raise Problem("empty", "no text")
    if mended is None or not mended.flaw:
        return Record(ordinal, raw.origin, text, None, None, raw.size_bytes)
    return Record(ordinal, mended.origin, text, None, None, raw.size_bytes, True, mended.flaw)


def finished(ordinal: int, raw: Raw, parse: Callable[[int, Raw], Record]) -> Record:
    """`parse`, with a `Problem` turned into the record that says so."""
    try:
        return parse(ordinal, raw)
    except Problem as bad:
        origin = bad.origin or raw.origin
        return Record(ordinal, origin, None, None, bad.reason, raw.size_bytes, detail=bad.detail)


_MISSING = object()


def lookup(row: Mapping[str, Any], field: str) -> Any:
    """The value of a field, by its whole name first, then part by part; a marker if there is none.

    Compare the result by `is_missing`.
    """
    if field in row:
        return row[field]
    head, dot, rest = field.partition(".")
    inner = row.get(head)
    return lookup(inner, rest) if dot and isinstance(inner, Mapping) else _MISSING


def is_missing(value: Any) -> bool:
    """Whether `lookup` found nothing."""
    return value is _MISSING


def joined_text(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The texts of the fields, joined by a blank line; `Problem` for what is no string."""
    texts = []
    for field in fields:
        value = lookup(row, field)
        if is_missing(value):
            raise Problem("missing_field", f"no field {field!r}")
        if not isinstance(value, str):
            raise not_a_string(field, value)
        texts.append(value)
    return "\n\n".join(texts)


def not_a_string(field: str, value: Any) -> Problem:
    """The problem of a field that holds something else than text."""
    kind = "null" if value is None else type(value).__name__
    return Problem("not_a_string", f"field {field!r} is {kind}, not a string")


def wrong_field(where: str, fields: Sequence[str], seen: Sequence[str]) -> UserError:
    """No record has the fields."""
    wanted = " and ".join(map(repr, fields))
    return UserError(
        f"{where}: no record has the field {wanted} (fields seen: "
        f"{', '.join(list(seen)[:_MAX_FIELDS_NAMED])}); name the right one with field "
        "(--text-field)"
    )


class Reader(ABC):
    """Reads one file. Splitting into records is apart from parsing, so skipping is cheap."""

    def __init__(self, path: Path, config: SourceConfig, invalid_utf8: InvalidUtf8) -> None:
        self.path = path
        self.config = config
        self.policy = invalid_utf8
        self.size = path.stat().st_size
        # Bytes of the file that `raw` has consumed.
        self.position = 0

    def check(self) -> None:
        """Refuse a file that can give no document with these settings (`UserError`)."""
        return None

    def count(self) -> int | None:
        """The number of records where that is known without reading the file."""
        return None

    @abstractmethod
    def raw(self, skip: int) -> Iterator[tuple[int, Raw]]:
        """(number in the file, record); may start anywhere from the first to number `skip`."""

    @abstractmethod
    def parse(self, ordinal: int, raw: Raw) -> Record:
        """Look into a record; `Problem` if it gives no document."""


def extra_missing(what: str, package: str, extra: str) -> UserError:
    """A package that this input needs is not installed."""
    return UserError(
        f'{what}: needs the `{package}` package; run pip install "mamba3-lite[{extra}]"'
    )
