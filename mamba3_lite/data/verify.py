"""Stage three of `prepare`: read every file of a prepared folder again and hold it to its word."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mamba3_lite.data.parts import document_key, file_sha256
from mamba3_lite.data.progress import StageBar, stage_bar
from mamba3_lite.data.shards import ShardFolder, open_shards
from mamba3_lite.errors import UserError

_MEND = "prepare the data again with --force"
_SCAN_DOCUMENTS = 4_096


def verify(train: Path, val: Path | None, *, progress: bool = False) -> int:
    """Check both splits; the number of tokens read.

    Hashes, counts, the largest id, exactly one EOS at the end of each document, and that no
    document of validation is in training too. `UserError` names the first file that is wrong.
    """
    # Validation first: only the keys of the smaller split are remembered.
    folders = [open_shards(path) for path in (val, train) if path is not None]
    total = sum(folder.manifest["tokens"] for folder in folders)
    known = np.empty(0, np.uint64)
    with stage_bar("verify", total, wanted=progress) as bar:
        for folder in folders:
            _check_hashes(folder)
            is_last = folder is folders[-1]
            found = []
            for keys in _document_keys(folder, bar):
                if is_last and np.isin(keys, known).any():
                    raise UserError(
                        f"{folder.path}: holds a document that {val} holds too; {_MEND}"
                    )
                found += [] if is_last else [keys]
            known = np.concatenate([known, *found])
    return total


def _check_hashes(folder: ShardFolder) -> None:
    entries = [*folder.manifest["shards"], *folder.manifest.get("index", {}).values()]
    for entry in entries:
        path = folder.path / entry["file"]
        if file_sha256(path) != entry["sha256"]:
            raise UserError(f"{path}: damaged (its SHA-256 is not the manifest's); {_MEND}")


def _document_keys(folder: ShardFolder, bar: StageBar) -> Iterator[np.ndarray[Any, Any]]:
    """The keys of all documents (n,), some at a time, each checked on the way."""
    manifest = folder.manifest
    starts = folder.document_starts()
    _check_counts(folder, starts)
    shards = [shard.tokens() for shard in folder.shards]
    ends = np.cumsum([len(tokens) for tokens in shards])
    for first in range(0, len(starts), _SCAN_DOCUMENTS):
        bounds = starts[first : first + _SCAN_DOCUMENTS + 1].astype(np.int64)
        if first + _SCAN_DOCUMENTS >= len(starts):
            bounds = np.append(bounds, manifest["tokens"])
        keys: list[int] = []
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            ids = _slice(shards, ends, start, stop)
            if start >= stop or np.flatnonzero(ids == manifest["eos_id"]).tolist() != [
                len(ids) - 1
            ]:
                raise UserError(
                    f"{folder.path}: document {first + len(keys)} (tokens {start} to {stop - 1}) "
                    f"does not end with its one EOS; {_MEND}"
                )
            keys.append(document_key(ids[:-1], ids.dtype))
        bar.advance(
            documents=len(keys),
            text_bytes=0,
            tokens=int(bounds[-1] - bounds[0]),
            completed=float(bar.tokens + bounds[-1] - bounds[0]),
        )
        yield np.array(keys, np.uint64)


def _check_counts(folder: ShardFolder, starts: np.ndarray[Any, Any]) -> None:
    manifest = folder.manifest
    for shard in folder.shards:
        largest = int(shard.tokens().max())
        if largest != shard.header.max_id or largest >= manifest["vocab_size"]:
            raise UserError(
                f"{shard.path}: its largest id is {largest}, its header says "
                f"{shard.header.max_id} of a vocabulary of {manifest['vocab_size']}; {_MEND}"
            )
    held = sum(shard.header.n_tokens for shard in folder.shards)
    sources = folder.document_sources()
    counted = np.bincount(sources, minlength=len(manifest["sources"])).tolist()
    listed = [source["documents"] for source in manifest["sources"]]
    summed = sum(source["tokens"] for source in manifest["sources"])
    if (held, summed, counted) != (manifest["tokens"], manifest["tokens"], listed) or starts[0]:
        raise UserError(f"{folder.path}: the counts of manifest.json are not its files'; {_MEND}")


def _slice(
    shards: list[np.ndarray[Any, Any]], ends: np.ndarray[Any, Any], start: int, stop: int
) -> np.ndarray[Any, Any]:
    """Tokens start..stop-1 of the stream, which may lie in several shards."""
    pieces = []
    number = int(np.searchsorted(ends, start, side="right"))
    while start < stop and number < len(shards):
        first = int(ends[number]) - len(shards[number])
        end = min(stop, int(ends[number]))
        pieces.append(shards[number][start - first : end - first])
        start, number = end, number + 1
    return pieces[0] if len(pieces) == 1 else np.concatenate([shards[0][:0], *pieces])
