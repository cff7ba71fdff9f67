"""Token shards on disk: a 128-byte header, then the tokens, memory-mapped; a manifest beside them.

Header, little-endian: magic 8s, version u32, dtype code u32 (1 = uint16, 2 = uint32), token count
u64, vocabulary size u32, largest token id u32, EOS id u32, four zero bytes, SHA-256 of the
tokenizer (32 bytes), zeros up to byte 128. A folder holds `tokens_00000.bin`, `tokens_00001.bin`,
... and `manifest.json`, and appears by a rename: a folder that exists is complete.

Where the documents are known, two more files index them, without a header and little-endian:
`documents.bin` (uint64, the start of every document in the token stream, global over the shards of
the folder) and `sources.bin` (uint16, every document's place in the manifest's list "sources").
Document i is tokens start[i] .. start[i+1]-1, the last one up to the end; its last token is the
EOS. The manifest's "index" holds for "documents" and "sources" each the file, entries and SHA-256.
"""

import contextlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mamba3_lite.data.files import atomic_folder, close_synced, write_json
from mamba3_lite.errors import UserError

MAGIC = b"M3LTOKEN"
VERSION = 1
HEADER_BYTES = 128
MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"
SOURCES = "sources.bin"
DEFAULT_SHARD_SIZE_TOKENS = 50_000_000

_MEND = "prepare the data again, or copy the whole folder anew"
_HEADER = struct.Struct("<8sIIQIII4x32s")
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
# Name in the manifest's "index": file, and type of an entry.
_INDEX: dict[str, tuple[str, np.dtype[Any]]] = {
    "documents": (DOCUMENTS, np.dtype("<u8")),
    "sources": (SOURCES, np.dtype("<u2")),
}


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """uint16 while every id fits in it, else uint32."""
    return _DTYPES[1] if vocab_size <= 65_536 else _DTYPES[2]


@dataclass(frozen=True)
class ShardHeader:
    """What the first 128 bytes of a shard say. `tokenizer_sha256` is 64 hex digits."""

    dtype: np.dtype[Any]
    n_tokens: int
    vocab_size: int
    max_id: int
    eos_id: int
    tokenizer_sha256: str

    def pack(self) -> bytes:
        """The header as `HEADER_BYTES` bytes."""
        code = next(code for code, dtype in _DTYPES.items() if dtype == self.dtype)
        packed = _HEADER.pack(
            MAGIC,
            VERSION,
            code,
            self.n_tokens,
            self.vocab_size,
            self.max_id,
            self.eos_id,
            bytes.fromhex(self.tokenizer_sha256),
        )
        return packed.ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True)
class Shard:
    """One validated shard file."""

    path: Path
    header: ShardHeader

    def tokens(self) -> np.ndarray[Any, Any]:
        """The tokens (n_tokens,), uint16 or uint32, memory-mapped and read-only."""
        header = self.header
        if header.n_tokens == 0:
            return np.empty(0, header.dtype)
        mapped = np.memmap(self.path, header.dtype, "r", HEADER_BYTES, (header.n_tokens,))
        # A plain view: slicing the memmap subclass costs ten times as much.
        return np.asarray(mapped)


@dataclass(frozen=True)
class ShardFolder:
    """A complete folder of shards in order, and its manifest."""

    path: Path
    shards: tuple[Shard, ...]
    manifest: dict[str, Any]

    @property
    def has_index(self) -> bool:
        """Whether the starts and sources of the documents are known."""
        return "index" in self.manifest

    def document_starts(self) -> np.ndarray[Any, Any]:
        """Global start of every document (documents,), uint64, memory-mapped and read-only."""
        return self._read_index("documents")

    def document_sources(self) -> np.ndarray[Any, Any]:
        """Place of every document's source in `manifest["sources"]` (documents,), uint16."""
        return self._read_index("sources")

    def _read_index(self, name: str) -> np.ndarray[Any, Any]:
        if not self.has_index:
            raise UserError(f"{self.path}: has no document index; prepare the data again")
        file, dtype = _INDEX[name]
        if not self.manifest["documents"]:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(self.path / file, dtype, "r"))


def is_shard(path: Path) -> bool:
    """Whether the file begins with the magic of a shard."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_shard(path: str | Path) -> Shard:
    """Validate one shard file against its header; `UserError` names the file and what is wrong."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as exc:
        raise UserError(f"{path}: cannot read this shard ({exc.strerror}); {_MEND}") from exc
    if len(raw) < HEADER_BYTES:
        raise UserError(
            f"{path}: truncated shard: {size} bytes, its header alone has {HEADER_BYTES}; {_MEND}"
        )
    magic, version, code, n_tokens, vocab_size, max_id, eos_id, sha = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise UserError(f"{path}: not a mamba3-lite shard (it begins with {magic!r}); {_MEND}")
    if version != VERSION:
        raise UserError(
            f"{path}: shard format version {version}, this program reads {VERSION}; {_MEND}"
        )
    if code not in _DTYPES:
        raise UserError(
            f"{path}: unknown token dtype code {code} (1 = uint16, 2 = uint32); {_MEND}"
        )
    dtype = _DTYPES[code]
    if dtype != dtype_for(vocab_size):
        raise UserError(
            f"{path}: {dtype.name} tokens do not go with a vocabulary of {vocab_size}; {_MEND}"
        )
    expected = HEADER_BYTES + n_tokens * dtype.itemsize
    if size != expected:
        kind = "truncated" if size < expected else "extended"
        raise UserError(
            f"{path}: {kind} shard: {size} bytes, but its header promises {n_tokens} tokens "
            f"({expected} bytes); {_MEND}"
        )
    return Shard(path, ShardHeader(dtype, n_tokens, vocab_size, max_id, eos_id, sha.hex()))


def open_shards(folder: str | Path) -> ShardFolder:
    """Validate a folder written by `ShardWriter`: every header against its file and the manifest.

    Hashes are not recomputed here: this costs one small read per shard.
    """
    folder = Path(folder)
    manifest_path = folder / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        entries = [(Path(e["file"]), int(e["tokens"])) for e in manifest["shards"]]
        fingerprint = manifest["tokenizer"]["fingerprint"]
        for entry in manifest.get("index", {}).values():
            bytes.fromhex(entry["sha256"])
    except OSError as exc:
        raise UserError(f"{manifest_path}: cannot read it ({exc.strerror}); {_MEND}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise UserError(f"{manifest_path}: not a shard manifest ({exc!r}); {_MEND}") from exc
    shards = []
    for name, n_tokens in entries:
        shard = read_shard(folder / name)
        if shard.header.n_tokens != n_tokens:
            raise UserError(
                f"{shard.path}: {shard.header.n_tokens} tokens, "
                f"but {manifest_path} lists {n_tokens}; {_MEND}"
            )
        if shard.header.tokenizer_sha256 != fingerprint:
            raise UserError(f"{shard.path}: another tokenizer than {manifest_path} names; {_MEND}")
        shards.append(shard)
    _check_index(folder, manifest)
    return ShardFolder(folder, tuple(shards), manifest)


def _check_index(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse an index that is cut or missing; a folder without one is fine."""
    for name in manifest.get("index", ()):
        file, dtype = _INDEX[name]
        path, expected = folder / file, manifest["documents"] * dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as exc:
            raise UserError(f"{path}: cannot read this index ({exc.strerror}); {_MEND}") from exc
        if size != expected:
            raise UserError(
                f"{path}: {size} bytes, but {manifest['documents']} documents need {expected}; "
                f"{_MEND}"
            )


class ShardWriter:
    """Write tokens as a folder of shards; a context manager.

    The folder appears under its name only when the block ends without an exception. `manifest`
    holds the written manifest from then on. With `source_names` the documents are indexed: they
    come whole through `append_documents` then, otherwise as a plain stream through `append`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vocab_size: int,
        eos_id: int,
        tokenizer_name: str,
        tokenizer_fingerprint: str,
        shard_size_tokens: int = DEFAULT_SHARD_SIZE_TOKENS,
        source_names: Sequence[str] | None = None,
    ) -> None:
        if shard_size_tokens < 1:
            raise UserError(f"shard_size_tokens must be at least 1, not {shard_size_tokens}")
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.eos_id = eos_id
        self.tokenizer_name = tokenizer_name
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.shard_size_tokens = shard_size_tokens
        self.dtype = dtype_for(vocab_size)
        self.n_tokens = 0
        self.n_documents = 0
        self.manifest: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        self._entries: list[dict[str, Any]] = []
        self._file: BufferedRandom | None = None
        self._shard_tokens = 0
        self._shard_max_id = 0
        self._source_names = source_names
        self._index: _IndexWriter | None = None

    def __enter__(self) -> "ShardWriter":
        self._partial = self._stack.enter_context(atomic_folder(self.folder))
        # Leaves the stack first, so the manifest is written before the folder is renamed.
        self._stack.push(self._seal)
        if self._source_names is not None:
            self._index = _IndexWriter(self._partial, self._source_names)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, value, trace)

    def append(self, tokens: ArrayLike, *, documents: int = 0) -> None:
        """Append ids (n,); `documents` is how many documents end with them.

        Raises `ValueError` for an id outside the vocabulary, `TypeError` where documents are
        indexed.
        """
        if self._index is not None:
            raise TypeError("documents are indexed here: use append_documents")
        self._append(tokens, documents)

    def append_documents(self, tokens: ArrayLike, lengths: ArrayLike, sources: ArrayLike) -> None:
        """Append whole documents, each with its EOS.

        `tokens` (n,) are their ids one after another, `lengths` (d,) the tokens of each, which sum
        to n, `sources` (d,) the places of their sources in `source_names`. `ValueError`: an id
        outside the vocabulary; `TypeError`: no `source_names` were given.
        """
        if self._index is None:
            raise TypeError("no document index here: give ShardWriter the source_names")
        counts = np.asarray(lengths, dtype=np.int64)
        self._index.add(self.n_tokens, counts, np.asarray(sources))
        self._append(tokens, counts.size)

    def _append(self, tokens: ArrayLike, documents: int) -> None:
        ids = np.asarray(tokens)
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                bad = low if low < 0 else high
                raise ValueError(f"token id {bad} is outside 0..{self.vocab_size - 1}")
        self.n_documents += documents
        self.n_tokens += ids.size
        while ids.size:
            room = self.shard_size_tokens - self._shard_tokens
            part, ids = ids[:room], ids[room:]
            self._write(part)

    def _write(self, part: np.ndarray[Any, Any]) -> None:
        if self._file is None:
            path = self._partial / f"tokens_{len(self._entries):05d}.bin"
            self._file = path.open("w+b")
            self._file.write(bytes(HEADER_BYTES))
        self._file.write(part.astype(self.dtype).tobytes())
        self._shard_tokens += part.size
        self._shard_max_id = max(self._shard_max_id, int(part.max()))
        if self._shard_tokens == self.shard_size_tokens:
            self._close_shard(self._file)

    def _close_shard(self, file: BufferedRandom) -> None:
        header = ShardHeader(
            self.dtype,
            self._shard_tokens,
            self.vocab_size,
            self._shard_max_id,
            self.eos_id,
            self.tokenizer_fingerprint,
        )
        file.seek(0)
        file.write(header.pack())
        digest = close_synced(file)
        name = Path(file.name).name
        self._entries.append({"file": name, "tokens": self._shard_tokens, "sha256": digest})
        self._file, self._shard_tokens, self._shard_max_id = None, 0, 0

    def _seal(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is not None:
            for file in (self._file, *(self._index.files.values() if self._index else ())):
                # The folder is about to go: a failed flush must not hide the first error.
                with contextlib.suppress(OSError):
                    if file is not None:
                        file.close()
            return False
        if self._file is not None:
            self._close_shard(self._file)
        self.manifest = {
            "format": "mamba3-lite-shards",
            "version": VERSION,
            "tokens": self.n_tokens,
            "documents": self.n_documents,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "tokenizer": {"name": self.tokenizer_name, "fingerprint": self.tokenizer_fingerprint},
            "shard_size_tokens": self.shard_size_tokens,
            "shards": self._entries,
        }
        if self._index is not None:
            self.manifest |= self._index.close()
        write_json(self._partial / MANIFEST, self.manifest)
        return False


class _IndexWriter:
    """Write where each document starts and whose it is, and count tokens by source."""

    def __init__(self, folder: Path, source_names: Sequence[str]) -> None:
        self.files = {name: (folder / file).open("w+b") for name, (file, _) in _INDEX.items()}
        self._names = list(source_names)
        self._documents = np.zeros(len(self._names), np.int64)
        self._tokens = np.zeros(len(self._names), np.int64)

    def add(self, first: int, lengths: np.ndarray[Any, Any], sources: np.ndarray[Any, Any]) -> None:
        """Documents of `lengths` tokens (d,) from token `first` on, of `sources` (d,)."""
        starts = first + np.cumsum(lengths) - lengths
        for name, values in (("documents", starts), ("sources", sources)):
            self.files[name].write(values.astype(_INDEX[name][1]).tobytes())
        size = len(self._names)
        self._documents += np.bincount(sources, minlength=size)
        # The weights of bincount are float64: exact below 2^53 tokens a call.
        self._tokens += np.bincount(sources, lengths, size).astype(np.int64)

    def close(self) -> dict[str, Any]:
        """Sync both files; their part of the manifest."""
        documents, tokens = self._documents.tolist(), self._tokens.tolist()
        total = max(sum(tokens), 1)
        return {
            "index": {
                name: {
                    "file": _INDEX[name][0],
                    "entries": sum(documents),
                    "sha256": close_synced(file),
                }
                for name, file in self.files.items()
            },
            "sources": [
                {"name": name, "documents": d, "tokens": t, "share": t / total}
                for name, d, t in zip(self._names, documents, tokens, strict=True)
            ],
        }
