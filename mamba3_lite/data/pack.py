"""Stage two of `prepare`: finished parts to mixed, split and packed shards.

It reads nothing but the parts, so begun again after a kill it writes the same bytes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from mamba3_lite.data.config import PrepareJob
from mamba3_lite.data.mixture import (
    OnExhausted,
    Taken,
    interleave,
    shares,
    split_quotas,
    validation_mask,
)
from mamba3_lite.data.parts import Part, State, read_part
from mamba3_lite.data.progress import stage_bar
from mamba3_lite.data.report import SourceReport
from mamba3_lite.data.shards import ShardWriter, dtype_for
from mamba3_lite.data.tokenizer import Tokenizer
from mamba3_lite.errors import UserError

# Documents are copied in runs of this many tokens: one by one they would cost twice the time.
_RUN_TOKENS = 1 << 19


class Packer:
    """Mixes the finished parts of a `State` into `folder/train` and `folder/val`."""

    def __init__(self, job: PrepareJob, state: State, tokenizer: Tokenizer) -> None:
        self._job = job
        self._state = state
        self._tokenizer = tokenizer
        self._parts = [state.parts(source.name) for source in job.sources]
        self._dtype = dtype_for(tokenizer.vocab_size)

    def run(self, folder: Path, *, progress: bool) -> tuple[list[SourceReport], int]:
        """Write both splits; a report for each source, and the number of shards.

        `UserError`: a split stays empty.
        """
        prepare, parts = self._job.prepare, self._parts
        val = [sum(part.val_tokens for part in some) for some in parts]
        train = [sum(part.tokens - part.val_tokens for part in some) for some in parts]
        wanted = dict(
            zip(
                ("train", "val"),
                split_quotas(
                    train,
                    val,
                    [source.weight for source in self._job.sources],
                    max_tokens=prepare.max_tokens,
                    val_fraction=prepare.val_fraction,
                    on_exhausted=cast(OnExhausted, prepare.on_exhausted),
                ),
                strict=True,
            )
        )
        splits = ("train", "val") if prepare.val_fraction > 0 else ("train",)
        for split in splits:
            if max(wanted[split]) < 2:
                raise self._empty_split(split)
        manifests = {}
        with stage_bar("pack", sum(map(sum, wanted.values())), wanted=progress) as bar:
            for split in splits:
                with self._writer(folder / split) as writer:
                    for run in _runs(interleave(self._streams(split), wanted[split])):
                        writer.append_documents(*run)
                        tokens = len(run[0])
                        bar.advance(
                            documents=len(run[1]),
                            text_bytes=0,
                            tokens=tokens,
                            completed=bar.tokens + tokens,
                        )
                manifests[split] = writer.manifest
        shards = sum(len(manifest["shards"]) for manifest in manifests.values())
        return self._reports(manifests, train), shards

    def _writer(self, folder: Path) -> ShardWriter:
        tokenizer = self._tokenizer
        return ShardWriter(
            folder,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer_name=tokenizer.name,
            tokenizer_fingerprint=tokenizer.fingerprint,
            shard_size_tokens=self._job.prepare.shard_size_tokens,
            source_names=[source.name for source in self._job.sources],
        )

    def _streams(self, split: str) -> list[Iterator[np.ndarray[Any, Any]]]:
        again = split == "train" and self._job.prepare.on_exhausted == "repeat"
        numbers = range(len(self._parts))
        return [self._documents(number, split, again) for number in numbers]

    def _documents(self, number: int, split: str, again: bool) -> Iterator[np.ndarray[Any, Any]]:
        """The documents of one source in one split, in the order of reading; `again`: for ever."""
        prepare = self._job.prepare
        check = split == "train"
        while True:
            for part in self._parts[number]:
                folder = self._state.work / part.source
                ids, documents = read_part(folder, part, self._dtype, check=check)
                in_val = validation_mask(
                    documents["key"], seed=prepare.seed, val_fraction=prepare.val_fraction
                )
                stops = np.cumsum(documents["length"].astype(np.int64))
                starts = stops - documents["length"].astype(np.int64)
                mine = in_val if split == "val" else ~in_val
                for start, stop in zip(starts[mine].tolist(), stops[mine].tolist(), strict=True):
                    yield ids[start:stop]
            check = False
            if not again:
                return

    def _reports(
        self, manifests: dict[str, dict[str, Any]], available: Sequence[int]
    ) -> list[SourceReport]:
        nothing = [{"documents": 0, "tokens": 0}] * len(self._parts)
        train = manifests["train"]["sources"]
        val = manifests["val"]["sources"] if "val" in manifests else nothing
        weights = shares([source.weight for source in self._job.sources])
        reports = []
        for number, (config, parts) in enumerate(zip(self._job.sources, self._parts, strict=True)):
            tokens = train[number]["tokens"]
            reports.append(
                SourceReport(
                    name=config.name,
                    weight=float(weights[number]),
                    share=train[number]["share"],
                    documents=train[number]["documents"],
                    tokens=tokens,
                    val_documents=val[number]["documents"],
                    val_tokens=val[number]["tokens"],
                    passes=tokens / max(available[number], 1),
                    used_up=tokens >= available[number] and self._state.is_finished(config.name),
                    records=sum(part.records for part in parts),
                    read_documents=sum(part.documents for part in parts),
                    read_tokens=sum(part.tokens for part in parts),
                    text_bytes=sum(part.text_bytes for part in parts),
                    repaired=sum(part.repaired for part in parts),
                    skipped=_skipped(parts),
                )
            )
        return reports

    def _empty_split(self, split: str) -> UserError:
        documents = sum(part.documents for some in self._parts for part in some)
        lacking = [
            source.name
            for source, parts in zip(self._job.sources, self._parts, strict=True)
            if not sum(_documents_of(part, split) for part in parts)
        ]
        whose = f" from source {', '.join(lacking)}" if lacking and len(self._parts) > 1 else ""
        return UserError(
            f"val_fraction {self._job.prepare.val_fraction}, max_tokens "
            f"{self._job.prepare.max_tokens}: of {documents} documents none falls into {split}"
            f"{whose}; change the fraction or add documents"
        )


def _documents_of(part: Part, split: str) -> int:
    return part.val_documents if split == "val" else part.documents - part.val_documents


def _skipped(parts: Sequence[Part]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part.skipped)
    return dict(sorted(counts.items()))


Run = tuple[np.ndarray[Any, Any], list[int], list[int]]


def _runs(documents: Iterator[Taken]) -> Iterator[Run]:
    """(ids, lengths, sources) of successive documents, copied together."""
    arrays: list[np.ndarray[Any, Any]] = []
    sources: list[int] = []
    tokens = 0
    for source, ids in documents:
        arrays.append(ids)
        sources.append(source)
        tokens += len(ids)
        if tokens >= _RUN_TOKENS:
            yield np.concatenate(arrays), [len(ids) for ids in arrays], sources
            arrays, sources, tokens = [], [], 0
    if arrays:
        yield np.concatenate(arrays), [len(ids) for ids in arrays], sources
