"""Windows of T+1 tokens over memory-mapped files, addressed by index.

Window i covers tokens i*T .. i*T + T (both included), so neighbours share one token; x drops the
last token of the window and y the first. Files are concatenated and windows may span them.
"""

import bisect
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mamba3_lite.data.shards import (
    MANIFEST,
    ShardFolder,
    ShardHeader,
    is_shard,
    open_shards,
    read_shard,
)
from mamba3_lite.data.tokenizer import fingerprint_of, load_tokenizer
from mamba3_lite.errors import UserError, reading

Tokens = np.ndarray[Any, Any]

# A target that does not count in the loss.
IGNORE_INDEX = -100

_SCAN_TOKENS = 1 << 22
_FULL_SCAN_BYTES = 1 << 30
_EDGE_BYTES = 4_096
# torch.save writes a zip archive since 1.6; pickles of older versions cannot be memory-mapped.
_ZIP_MAGIC = b"PK\x03\x04"
_OLD_PICKLE_MAGIC = b"\x80\x02"


class WindowDataset(Dataset[tuple[Tensor, ...]]):
    """Item i is (x, y), in document mode (x, y, segment_ids); each int64 (max_seq_len,).

    `IndexError` outside 0..n_windows-1. `fingerprint` is equal for equal data wherever it lies: a
    resumed run compares it.
    """

    n_tokens: int
    n_windows: int
    fingerprint: str
    tokenizer_name: str | None = None
    tokenizer_fingerprint: str | None = None

    def __len__(self) -> int:
        return self.n_windows

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.n_windows:
            raise IndexError(f"window {index} is outside 0..{self.n_windows - 1}")


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens; `header` is None for a `torch.save`d tensor."""

    path: Path
    n_tokens: int
    header: ShardHeader | None = None
    sha256: str | None = None
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_bytes", self.path.stat().st_size)

    def require_whole(self) -> None:
        """``UserError`` when the file has changed its size since it was found.

        The end of a page that a shorter file leaves mapped reads as zeros, which are tokens.
        """
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return  # what was removed whole stays mapped whole
        if size != self.n_bytes:
            raise UserError(
                f"{self.path} was cut or written while it was read ({self.n_bytes:,} bytes, now "
                f"{size:,}); restore it and start again: the run goes on from its last checkpoint"
            )

    def require_intact(self) -> None:
        """``UserError`` when the file is not the one that its manifest describes, byte for byte.

        Reads all of it.
        """
        if self.sha256 is None:
            return
        with self.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                raise UserError(
                    f"{self.path} is damaged (its SHA-256 is not the manifest's); prepare the data "
                    "again, or copy the whole folder anew"
                )

    def open(self) -> Tokens:
        """The tokens (n_tokens,), memory-mapped, in the dtype of the file."""
        if self.header is not None:
            return read_shard(self.path).tokens()
        return _load_tensor(self.path).numpy()


class TokenStream:
    """The tokens at a path as one long sequence, whatever the format.

    `path`: a `torch.save`d int64 tensor (n,); a folder of `shard_*.bin` such tensors (in order of
    name); a folder of our shards; or one such shard. `UserError`: a missing path, an unknown or
    damaged format. Pickles without its open files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with reading(f"data path {path}", "correct the path or its permissions"):
            self.files, self.folder = _find_files(self.path)
        self._ends = list(np.cumsum([f.n_tokens for f in self.files], dtype=np.int64).tolist())
        self.n_tokens: int = self._ends[-1] if self._ends else 0
        self._arrays: list[Tokens] | None = None
        self._starts: Tokens | None = None
        self._intact: set[int] = set()  # files that have been found so

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None, "_starts": None}

    @property
    def header(self) -> ShardHeader | None:
        """The first shard's header; None for `torch.save`d tensors."""
        return self.files[0].header if self.files else None

    @property
    def arrays(self) -> list[Tokens]:
        """The tokens of each file, memory-mapped."""
        if self._arrays is None:
            self._arrays = [file.open() for file in self.files]
        return self._arrays

    @property
    def has_index(self) -> bool:
        """Whether the data come with a document index."""
        return self.folder is not None and self.folder.has_index

    def document_starts(self) -> Tokens:
        """Offset of every document's first token (n_documents,) int64, memory-mapped.

        Only where `has_index`.
        """
        if self._starts is None:
            assert self.folder is not None
            # Offsets fit int64, and numpy would search an unsigned array by way of float64.
            self._starts = self.folder.document_starts().view("<i8")
        return self._starts

    def check_index(self) -> None:
        """Read the whole index once; `UserError` when it is not as it was written."""
        assert self.folder is not None
        entry = self.folder.manifest["index"]["documents"]
        path = self.folder.path / entry["file"]
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise UserError(
                    f"{path}: damaged document index (its SHA-256 is not the manifest's); prepare "
                    "the data again, or copy the whole folder anew"
                )

    def locate(self, position: int) -> tuple[int, int]:
        """(file number, offset in that file) of token `position`."""
        number = bisect.bisect_right(self._ends, position)
        return number, position - (self._ends[number] - self.files[number].n_tokens)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1 as int64, one slice copied per file touched.

        A file is hashed when it is touched for the first time: a tenth of a second for a shard of
        50 M tokens, in the thread that reads ahead.
        """
        arrays = self.arrays
        out = np.empty(stop - start, np.int64)
        number = bisect.bisect_right(self._ends, start)
        position = start
        while position < stop:
            first = self._ends[number] - self.files[number].n_tokens
            end = min(stop, self._ends[number])
            if number not in self._intact:
                self.files[number].require_intact()
                self._intact.add(number)
            self.files[number].require_whole()  # or what is gone ends the process
            out[position - start : end - start] = arrays[number][position - first : end - first]
            self.files[number].require_whole()
            position = end
            number += 1
        return out

    def pieces(self) -> Iterator[tuple[int, Tokens]]:
        """(offset, tokens) of the whole stream in pieces of flat memory, in the files' dtype."""
        for end, array in zip(self._ends, self.arrays, strict=True):
            first = end - len(array)
            for start in range(0, len(array), _SCAN_TOKENS):
                yield first + start, array[start : start + _SCAN_TOKENS]


class PretrainDataset(WindowDataset):
    """The tokens at `data_path` (see :class:`TokenStream`) as windows for next-token prediction.

    Args:
        document_mode: items are (x, y, segment_ids); ids count the documents of a window from 0.
        mask_boundary_targets: the target that is the first token of a document, where the input is
            the EOS of the one before, is IGNORE_INDEX.
        tokenizer: the one that the data must be made with, by the SHA-256 in the headers of our
            shards; None takes any. `torch.save`d tensors do not say, and are taken: a document ends
            with its EOS there, or with GPT-2's.

    All checks run here, before the first opt_step: `UserError` for what the stream refuses, fewer
    than max_seq_len + 1 tokens, another tokenizer, an id outside 0..vocab_size-1, a damaged
    document index.
    """

    def __init__(
        self,
        data_path: str | Path,
        max_seq_len: int,
        vocab_size: int,
        *,
        document_mode: bool = False,
        mask_boundary_targets: bool = False,
        tokenizer: str | None = None,
    ) -> None:
        if max_seq_len < 1:
            raise UserError(f"max_seq_len must be at least 1, not {max_seq_len}")
        self.stream = stream = TokenStream(data_path)
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.document_mode = document_mode
        self.mask_boundary_targets = mask_boundary_targets
        self.n_tokens = stream.n_tokens
        self.n_windows = (self.n_tokens - 1) // max_seq_len
        if self.n_windows < 1:
            raise UserError(
                f"{stream.path}: holds {self.n_tokens} tokens, but one window needs "
                f"{max_seq_len + 1} (max_seq_len {max_seq_len} + 1); use more data or a smaller "
                "max_seq_len"
            )
        if stream.header is not None:
            self.tokenizer_fingerprint = stream.header.tokenizer_sha256
        if stream.folder is not None:
            self.tokenizer_name = stream.folder.manifest["tokenizer"].get("name")
        if tokenizer is not None and self.tokenizer_fingerprint is not None:
            self._check_tokenizer(tokenizer, self.tokenizer_fingerprint)
        self._check_ids()
        self.fingerprint = _fingerprint(stream.files)
        self._eos_id: int | None = None
        if document_mode or mask_boundary_targets:
            self._find_documents(tokenizer or "gpt2")

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self._check_index(index)
        start = index * self.max_seq_len
        window = self.stream.read(start, start + self.max_seq_len + 1)
        # Large shards are trusted by their header at the start, and a file may change under a run.
        bad = _first_bad(window, self.vocab_size)
        if bad is not None:
            raise self._bad_id(*self.stream.locate(start + bad), int(window[bad]))
        x, y = window[:-1], window[1:]
        if not (self.document_mode or self.mask_boundary_targets):
            return torch.from_numpy(x), torch.from_numpy(y)
        begins = self._document_begins(window, start)
        if self.mask_boundary_targets:
            y = y.copy()  # x lies in the same memory
            y[begins - 1] = IGNORE_INDEX
        if not self.document_mode:
            return torch.from_numpy(x), torch.from_numpy(y)
        ids = np.zeros(self.max_seq_len + 1, np.int64)
        ids[begins] = 1
        return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(ids[:-1].cumsum())

    def _find_documents(self, tokenizer: str) -> None:
        """Open the document index or, where there is none, learn the EOS id."""
        if self.stream.has_index:
            self.stream.check_index()
            return
        header = self.stream.header
        self._eos_id = load_tokenizer(tokenizer).eos_id if header is None else header.eos_id
        if self._eos_id >= self.vocab_size:
            raise UserError(
                f"{self.stream.path}: documents end with id {self._eos_id} (the EOS of tokenizer "
                f"{tokenizer!r}), outside 0..{self.vocab_size - 1} (vocab_size {self.vocab_size}); "
                "name the tokenizer of these data in data.tokenizer, or turn data.document_mode "
                "and data.mask_boundary_targets off"
            )

    def _document_begins(self, window: Tokens, start: int) -> Tokens:
        """Places 1..max_seq_len of the window at which another document begins."""
        if self._eos_id is not None:
            return np.flatnonzero(window[:-1] == self._eos_id) + 1
        starts = self.stream.document_starts()
        low, high = np.searchsorted(starts, (start + 1, start + len(window)))
        return starts[low:high] - start

    def _check_tokenizer(self, wanted: str, found: str) -> None:
        """Refuse the ids of another tokenizer: as long as they fit, they would train, as noise."""
        expected = fingerprint_of(wanted)
        if found != expected:
            named = f" {self.tokenizer_name!r}" if self.tokenizer_name else ""
            raise UserError(
                f"{self.stream.path}: made with another tokenizer{named} than data.tokenizer "
                f"{wanted!r} (SHA-256 {found[:12]}..., not {expected[:12]}...); name theirs in "
                "data.tokenizer, or prepare the data again with this one"
            )

    def _check_ids(self) -> None:
        """Refuse ids outside the vocabulary: by a full scan, or by the headers of large shards."""
        files, arrays = self.stream.files, self.stream.arrays
        large = sum(file.path.stat().st_size for file in files) > _FULL_SCAN_BYTES
        for number, file in enumerate(files):
            header = file.header
            if not (header and large and header.max_id < self.vocab_size):
                bad = _first_bad(arrays[number], self.vocab_size)
                if bad is not None:
                    raise self._bad_id(number, bad, int(arrays[number][bad]))
        # After the ids: a bad id is the more telling complaint.
        for file in files:
            if file.header and file.header.vocab_size > self.vocab_size:
                raise UserError(
                    f"{file.path}: written with a vocabulary of {file.header.vocab_size} ids, more "
                    f"than vocab_size {self.vocab_size}; use the model of that vocabulary"
                )

    def _bad_id(self, number: int, offset: int, token: int) -> UserError:
        return UserError(
            f"{self.stream.files[number].path}: token {offset} has id {token}, outside "
            f"0..{self.vocab_size - 1} (vocab_size {self.vocab_size}); prepare the data with the "
            "model's tokenizer or correct vocab_size"
        )


class DummyDataset(WindowDataset):
    """`n_windows` windows of seeded uniform random ids: a wiring check without data.

    In document mode a window is two documents of equal length.
    """

    def __init__(
        self,
        n_windows: int,
        max_seq_len: int,
        vocab_size: int,
        seed: int,
        *,
        document_mode: bool = False,
    ) -> None:
        self.n_windows = n_windows
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.seed = seed
        self.document_mode = document_mode
        self.n_tokens = n_windows * max_seq_len + 1
        self.fingerprint = f"dummy:{n_windows}:{max_seq_len}:{vocab_size}:{seed}"

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self._check_index(index)
        rng = np.random.default_rng([self.seed, index])
        window = rng.integers(self.vocab_size, size=self.max_seq_len + 1, dtype=np.int64)
        pair = torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])
        if not self.document_mode:
            return pair
        return *pair, torch.arange(self.max_seq_len) * 2 // self.max_seq_len


def _find_files(path: Path) -> tuple[list[TokenFile], ShardFolder | None]:
    """The token files of `path` in order, each opened once; and the folder if it is one of ours."""
    if not path.exists():
        raise UserError(f"data path {path} does not exist; prepare data or correct the path")
    if path.is_file():
        return [_probe_file(path)], None
    if (path / MANIFEST).is_file():
        folder = open_shards(path)
        hashes = [entry.get("sha256") for entry in folder.manifest["shards"]]
        files = [
            TokenFile(shard.path, shard.header.n_tokens, shard.header, sha256)
            for shard, sha256 in zip(folder.shards, hashes, strict=True)
        ]
        return files, folder
    if (path / "train" / MANIFEST).is_file():
        raise UserError(f"data path {path} holds prepared splits; use {path / 'train'}")
    shards = sorted(path.glob("shard_*.bin"))
    if not shards:
        raise UserError(
            f"data path {path} is a folder without {MANIFEST} or shard_*.bin files; "
            "make one with `mamba3-lite prepare`"
        )
    return [_probe_file(shard) for shard in shards], None


def _probe_file(path: Path) -> TokenFile:
    try:
        with path.open("rb") as file:
            start = file.read(4 * 1024)
        ours = is_shard(path)
    except OSError as exc:
        raise UserError(f"{path}: cannot read it ({exc.strerror})") from exc
    if ours:
        header = read_shard(path).header
        return TokenFile(path, header.n_tokens, header)
    if start.startswith(_ZIP_MAGIC):
        return TokenFile(path, _load_tensor(path).numel())
    if start.startswith(_OLD_PICKLE_MAGIC):
        raise UserError(f"{path}: saved in torch's old format; save it again with torch.save")
    whole = np.frombuffer(start[: len(start) // 4 * 4], "<u4")
    if whole.size and path.stat().st_size % 4 == 0 and int(whole.max()) < 1 << 24:
        raise UserError(
            f"{path}: looks like raw uint32 token records, which cannot be trained on directly; "
            "convert them with `mamba3-lite prepare`, or torch.save them as one int64 tensor"
        )
    raise UserError(
        f"{path}: unknown data format (neither a mamba3-lite shard nor a torch.save'd tensor); "
        "make shards with `mamba3-lite prepare`"
    )


def _load_tensor(path: Path) -> Tensor:
    """The memory-mapped int64 tensor (n,) saved at `path`."""
    try:
        value = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as exc:
        # Damaged bytes make the unpickler raise nearly anything: UnicodeDecodeError, KeyError, ...
        reason = str(exc).split("\n")[0][:200]
        raise UserError(
            f"{path}: not a readable torch.save'd tensor ({reason}); write it again"
        ) from exc
    if not isinstance(value, Tensor):
        raise UserError(f"{path}: holds a {type(value).__name__}; one int64 tensor is needed")
    if value.dtype != torch.int64 or value.ndim != 1:
        raise UserError(
            f"{path}: holds a {value.dtype} tensor of shape {tuple(value.shape)}; one dimension "
            "of torch.int64 is needed"
        )
    return value


def _first_bad(tokens: Tokens, vocab_size: int) -> int | None:
    """Position of the first id outside 0..vocab_size-1, read in pieces of flat memory."""
    for start in range(0, len(tokens), _SCAN_TOKENS):
        part = tokens[start : start + _SCAN_TOKENS]
        if int(part.min()) < 0 or int(part.max()) >= vocab_size:
            wide = part.astype(np.int64)
            return start + int(np.argmax((wide < 0) | (wide >= vocab_size)))
    return None


def _fingerprint(files: list[TokenFile]) -> str:
    """SHA-256 over format, sizes, edges and manifest hashes; not over the paths."""
    records = []
    for file in files:
        size = file.path.stat().st_size
        with file.path.open("rb") as stream:
            edges = hashlib.sha256(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            edges.update(stream.read(_EDGE_BYTES))
        kind = "torch" if file.header is None else file.header.dtype.name
        records.append([kind, file.n_tokens, size, edges.hexdigest(), file.sha256])
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()
