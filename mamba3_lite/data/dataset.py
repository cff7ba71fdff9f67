"""Windows of T+1 tokens over memory-mapped files, addressed by index.

Window i covers tokens i*T .. i*T + T (both included), so neighbours share one token; x drops the
last token of the window and y the first. Files are concatenated and windows may span them.
"""

import bisect
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mamba3_lite.data.shards import MANIFEST, ShardHeader, is_shard, open_shards, read_shard
from mamba3_lite.errors import UserError, reading

Tokens = np.ndarray[Any, Any]

_SCAN_TOKENS = 1 << 22
_FULL_SCAN_BYTES = 1 << 30
_EDGE_BYTES = 4_096
# torch.save writes a zip archive since 1.6; pickles of older versions cannot be memory-mapped.
_ZIP_MAGIC = b"PK\x03\x04"
_OLD_PICKLE_MAGIC = b"\x80\x02"


class WindowDataset(Dataset[tuple[Tensor, Tensor]]):
    """Item i is (x, y), both int64 (max_seq_len,). `IndexError` outside 0..n_windows-1.

    `fingerprint` is equal for equal data wherever it lies: a resumed run compares it.
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
class _TokenFile:
    """One file of tokens; `header` is None for a `torch.save`d tensor."""

    path: Path
    n_tokens: int
    header: ShardHeader | None = None
    sha256: str | None = None

    def open(self) -> Tokens:
        if self.header is not None:
            return read_shard(self.path).tokens()
        return _load_tensor(self.path).numpy()


class PretrainDataset(WindowDataset):
    """The tokens at `data_path` as windows for next-token prediction.

    `data_path`: a `torch.save`d int64 tensor (n,); a folder of `shard_*.bin` such tensors (in order
    of name); a folder of our shards; or one such shard. All checks run here, before the first
    opt_step: `UserError` for a missing path, an unknown or damaged format, fewer than
    max_seq_len + 1 tokens, or an id outside 0..vocab_size-1. Pickles without its open files.
    """

    def __init__(self, data_path: str | Path, max_seq_len: int, vocab_size: int) -> None:
        if max_seq_len < 1:
            raise UserError(f"max_seq_len must be at least 1, not {max_seq_len}")
        self.data_path = Path(data_path)
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        with reading(f"data path {data_path}", "correct the path or its permissions"):
            self._files, manifest = _find_files(self.data_path)
        self._ends = list(np.cumsum([f.n_tokens for f in self._files], dtype=np.int64).tolist())
        self.n_tokens = self._ends[-1] if self._ends else 0
        self.n_windows = (self.n_tokens - 1) // max_seq_len
        if self.n_windows < 1:
            raise UserError(
                f"{self.data_path}: holds {self.n_tokens} tokens, but one window needs "
                f"{max_seq_len + 1} (max_seq_len {max_seq_len} + 1); use more data or a smaller "
                "max_seq_len"
            )
        self._arrays: list[Tokens] | None = None
        self._check_ids()
        self.fingerprint = _fingerprint(self._files)
        if self._files[0].header is not None:
            self.tokenizer_fingerprint = self._files[0].header.tokenizer_sha256
        if manifest is not None:
            self.tokenizer_name = manifest["tokenizer"].get("name")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._check_index(index)
        start = index * self.max_seq_len
        window = self._read(start, start + self.max_seq_len + 1)
        # Large shards are trusted by their header at the start, and a file may change under a run.
        bad = _first_bad(window, self.vocab_size)
        if bad is not None:
            number = bisect.bisect_right(self._ends, start + bad)
            first = self._ends[number] - self._files[number].n_tokens
            raise self._bad_id(number, start + bad - first, int(window[bad]))
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}

    def _open_arrays(self) -> list[Tokens]:
        if self._arrays is None:
            self._arrays = [file.open() for file in self._files]
        return self._arrays

    def _read(self, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1 as int64, one slice copied per file touched."""
        arrays = self._open_arrays()
        out = np.empty(stop - start, np.int64)
        number = bisect.bisect_right(self._ends, start)
        position = start
        while position < stop:
            first = self._ends[number] - self._files[number].n_tokens
            end = min(stop, self._ends[number])
            out[position - start : end - start] = arrays[number][position - first : end - first]
            position = end
            number += 1
        return out

    def _check_ids(self) -> None:
        """Refuse ids outside the vocabulary: by a full scan, or by the headers of large shards."""
        large = sum(file.path.stat().st_size for file in self._files) > _FULL_SCAN_BYTES
        arrays = self._open_arrays()
        for number, file in enumerate(self._files):
            header = file.header
            if not (header and large and header.max_id < self.vocab_size):
                bad = _first_bad(arrays[number], self.vocab_size)
                if bad is not None:
                    raise self._bad_id(number, bad, int(arrays[number][bad]))
        # After the ids: a bad id is the more telling complaint.
        for file in self._files:
            if file.header and file.header.vocab_size > self.vocab_size:
                raise UserError(
                    f"{file.path}: written with a vocabulary of {file.header.vocab_size} ids, more "
                    f"than vocab_size {self.vocab_size}; use the model of that vocabulary"
                )

    def _bad_id(self, number: int, position: int, token: int) -> UserError:
        return UserError(
            f"{self._files[number].path}: token {position} has id {token}, outside "
            f"0..{self.vocab_size - 1} (vocab_size {self.vocab_size}); prepare the data with the "
            "model's tokenizer or correct vocab_size"
        )


class DummyDataset(WindowDataset):
    """`n_windows` windows of seeded uniform random ids: a wiring check without data."""

    def __init__(self, n_windows: int, max_seq_len: int, vocab_size: int, seed: int) -> None:
        self.n_windows = n_windows
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.seed = seed
        self.n_tokens = n_windows * max_seq_len + 1
        self.fingerprint = f"dummy:{n_windows}:{max_seq_len}:{vocab_size}:{seed}"

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._check_index(index)
        rng = np.random.default_rng([self.seed, index])
        window = rng.integers(self.vocab_size, size=self.max_seq_len + 1, dtype=np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def _find_files(path: Path) -> tuple[list[_TokenFile], dict[str, Any] | None]:
    """The token files of `path` in order, each opened once to learn its length."""
    if not path.exists():
        raise UserError(f"data path {path} does not exist; prepare data or correct the path")
    if path.is_file():
        return [_probe_file(path)], None
    if (path / MANIFEST).is_file():
        folder = open_shards(path)
        hashes = [entry.get("sha256") for entry in folder.manifest["shards"]]
        files = [
            _TokenFile(shard.path, shard.header.n_tokens, shard.header, sha256)
            for shard, sha256 in zip(folder.shards, hashes, strict=True)
        ]
        return files, folder.manifest
    if (path / "train" / MANIFEST).is_file():
        raise UserError(f"data path {path} holds prepared splits; use {path / 'train'}")
    shards = sorted(path.glob("shard_*.bin"))
    if not shards:
        raise UserError(
            f"data path {path} is a folder without {MANIFEST} or shard_*.bin files; "
            "make one with `mamba3-lite prepare`"
        )
    return [_probe_file(shard) for shard in shards], None


def _probe_file(path: Path) -> _TokenFile:
    try:
        with path.open("rb") as file:
            start = file.read(4 * 1024)
        ours = is_shard(path)
    except OSError as exc:
        raise UserError(f"{path}: cannot read it ({exc.strerror})") from exc
    if ours:
        header = read_shard(path).header
        return _TokenFile(path, header.n_tokens, header)
    if start.startswith(_ZIP_MAGIC):
        return _TokenFile(path, _load_tensor(path).numel())
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


def _fingerprint(files: list[_TokenFile]) -> str:
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
