"""The half-done state of a `prepare`: finished parts of token ids, and a database that counts them.

A part is `part_00000.tok`, the ids of its documents one after another, each with its EOS
(little-endian, uint16 or uint32), and `part_00000.docs`, one `DOCUMENT` record for each. A part
exists when the database says so: its files are synced and renamed first, then one transaction
records the part, the documents it has seen, and where reading goes on. Whatever else lies in the
work folder is left over from a run that was killed, and is deleted.
"""

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from mamba3_lite.data.files import close_synced, sync_folder
from mamba3_lite.errors import UserError

DATABASE = "state.sqlite"

# Tokens with the EOS, and 64 bits of a hash of the ids that tells documents apart.
DOCUMENT = np.dtype([("length", "<u8"), ("key", "<u8")])

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parts (
    source TEXT NOT NULL, number INTEGER NOT NULL, last INTEGER NOT NULL, content TEXT NOT NULL,
    PRIMARY KEY (source, number));
CREATE TABLE IF NOT EXISTS seen (key BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS signatures (
    position INTEGER PRIMARY KEY AUTOINCREMENT, signature BLOB NOT NULL);
"""


@dataclass(frozen=True)
class Part:
    """What one finished part holds. Tokens include the EOS of each document."""

    source: str
    number: int
    next_ordinal: int
    records: int
    documents: int
    tokens: int
    val_documents: int
    val_tokens: int
    text_bytes: int
    read_bytes: int
    repaired: int
    tokens_sha256: str
    documents_sha256: str
    skipped: dict[str, int] = field(default_factory=dict)


class State:
    """The database of a work folder. `UserError` when it is no database of ours."""

    def __init__(self, work: Path) -> None:
        self.work = work
        path = work / DATABASE
        self._database = sqlite3.connect(path, isolation_level=None)
        try:
            self._database.executescript(_SCHEMA)
        except sqlite3.DatabaseError as exc:
            self._database.close()
            if getattr(exc, "sqlite_errorcode", None) != sqlite3.SQLITE_NOTADB:
                raise
            raise UserError(f"{path}: damaged ({exc}); start over with --force") from exc

    def close(self) -> None:
        """Close the database; nothing is pending outside of `commit` and `set_fact`."""
        self._database.close()

    def fact(self, name: str) -> Any:
        """A stored JSON value, or None."""
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_fact(self, name: str, value: Any) -> None:
        """Store a JSON value durably."""
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, _json(value)))

    def parts(self, source: str) -> list[Part]:
        """The finished parts of a source, in order."""
        rows = self._database.execute(
            "SELECT content FROM parts WHERE source = ? ORDER BY number", (source,)
        )
        return [Part(**json.loads(content)) for (content,) in rows]

    def has_parts(self, source: str) -> bool:
        """Whether a part of the source is finished."""
        query = "SELECT 1 FROM parts WHERE source = ? LIMIT 1"
        return self._database.execute(query, (source,)).fetchone() is not None

    def has_documents(self) -> bool:
        """Whether there is anything that would be lost."""
        rows = self._database.execute("SELECT content FROM parts")
        return any(json.loads(content)["documents"] for (content,) in rows)

    def is_finished(self, source: str) -> bool:
        """Whether the last part of a source has been written."""
        query = "SELECT 1 FROM parts WHERE source = ? AND last"
        return self._database.execute(query, (source,)).fetchone() is not None

    def has_seen(self, key: bytes) -> bool:
        """Whether a document with this key is in a finished part."""
        query = "SELECT 1 FROM seen WHERE key = ?"
        return self._database.execute(query, (key,)).fetchone() is not None

    def signatures(self) -> Iterator[bytes]:
        """The near-duplicate signatures of all documents kept so far, in order."""
        for (signature,) in self._database.execute(
            "SELECT signature FROM signatures ORDER BY position"
        ):
            yield signature

    def commit(
        self,
        part: Part,
        *,
        last: bool,
        keys: Iterable[bytes] = (),
        signatures: Iterable[bytes] = (),
    ) -> None:
        """Record a part whose files are in place, and what it has seen, at once or not at all."""
        run = self._database.execute
        run("BEGIN IMMEDIATE")
        try:
            run(
                "INSERT INTO parts VALUES (?, ?, ?, ?)",
                (part.source, part.number, last, _json(asdict(part))),
            )
            self._database.executemany(
                "INSERT OR IGNORE INTO seen VALUES (?)", ((key,) for key in keys)
            )
            self._database.executemany(
                "INSERT INTO signatures (signature) VALUES (?)", ((s,) for s in signatures)
            )
            run("COMMIT")
        except BaseException:
            # A full disk may have ended the transaction by itself.
            if self._database.in_transaction:
                run("ROLLBACK")
            raise

    def delete_uncommitted(self, sources: Sequence[str]) -> None:
        """Delete the files of parts that a killed run did not finish."""
        for source in sources:
            folder = self.work / source
            kept = {path for part in self.parts(source) for path in part_paths(folder, part.number)}
            for path in folder.glob("*") if folder.is_dir() else ():
                if path not in kept:
                    path.unlink()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def part_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """(file of the ids, file of the documents) of a part."""
    return folder / f"part_{number:05d}.tok", folder / f"part_{number:05d}.docs"


class PartFiles(NamedTuple):
    """What was written: the `DOCUMENT` records (documents,), and the SHA-256 of both files."""

    documents: np.ndarray[Any, Any]
    tokens_sha256: str
    documents_sha256: str


class PartWriter:
    """Write the files of one part; a context manager that leaves nothing unless `finish` ran."""

    def __init__(self, folder: Path, number: int, *, dtype: np.dtype[Any], eos_id: int) -> None:
        self._final = part_paths(folder, number)
        self._partial = [path.with_name(path.name + ".partial") for path in self._final]
        self._dtype = dtype
        self._eos = np.array([eos_id], dtype).tobytes()
        self._lengths, self._keys = array("Q"), array("Q")
        self._length = 0
        self._hash = _document_hash()
        self.tokens = 0

    def __enter__(self) -> "PartWriter":
        self._final[0].parent.mkdir(exist_ok=True)
        self._file = self._partial[0].open("w+b")
        return self

    def add(self, ids: np.ndarray[Any, Any], *, ends: bool) -> None:
        """Append ids (n,) of the current document, and its EOS where it ends."""
        raw = ids.astype(self._dtype, copy=False).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self._length += len(ids)
        if ends:
            self._file.write(self._eos)
            key = int.from_bytes(self._hash.digest(), "little")
            self._lengths.append(self._length + 1)
            self._keys.append(key)
            self.tokens += self._length + 1
            self._length, self._hash = 0, _document_hash()

    def finish(self) -> PartFiles:
        """Put both files in place."""
        assert self._length == 0, "a part ends where a document ends"
        documents = np.empty(len(self._keys), DOCUMENT)
        documents["length"], documents["key"] = self._lengths, self._keys
        with self._partial[1].open("w+b") as file:
            file.write(documents.tobytes())
            documents_sha256 = close_synced(file)
        tokens_sha256 = close_synced(self._file)
        for partial, final in zip(self._partial, self._final, strict=True):
            partial.rename(final)
        sync_folder(self._final[0].parent)
        return PartFiles(documents, tokens_sha256, documents_sha256)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError:
            # Flushing to a full disk fails again; the first error says it already.
            if kind is None:
                raise
        finally:
            for path in self._partial:
                path.unlink(missing_ok=True)


def document_key(ids: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> int:
    """64 bits of a hash of a document's ids (n,), its EOS left out: the key of its record."""
    digest = _document_hash(ids.astype(dtype, copy=False).tobytes()).digest()
    return int.from_bytes(digest, "little")


def _document_hash(raw: bytes = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(raw, digest_size=8)


def read_part(
    folder: Path, part: Part, dtype: np.dtype[Any], *, check: bool = False
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(ids (tokens,) memory-mapped, `DOCUMENT` records (documents,)) of a finished part.

    `check` recomputes both SHA-256. `UserError`: a file is missing, or not what was written.
    """
    paths = part_paths(folder, part.number)
    expected = (
        (part.tokens * dtype.itemsize, part.tokens_sha256),
        (part.documents * DOCUMENT.itemsize, part.documents_sha256),
    )
    for path, (size, sha256) in zip(paths, expected, strict=True):
        try:
            intact = path.stat().st_size == size and (not check or file_sha256(path) == sha256)
        except OSError as exc:
            raise UserError(f"{path}: {exc.strerror}; start over with --force") from exc
        if not intact:
            raise UserError(f"{path}: not as it was written; start over with --force")
    if not part.documents:
        return np.empty(0, dtype), np.empty(0, DOCUMENT)
    return np.asarray(np.memmap(paths[0], dtype, "r")), np.fromfile(paths[1], DOCUMENT)


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
