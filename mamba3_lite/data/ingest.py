"""Stage one of `prepare`: records to cleaned, unique, tokenised documents, part by part.

Which part comes next depends only on the parts that are finished, and what a part holds only on
where it begins, so a run that was killed and started again does what an uninterrupted one does.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from mamba3_lite.data.clean import reason_to_drop
from mamba3_lite.data.config import PrepareJob
from mamba3_lite.data.dedup import NearDuplicates, exact_key, near_signature
from mamba3_lite.data.encode import EncoderPool, pieces_of
from mamba3_lite.data.mixture import OnExhausted, tokens_needed, val_budget_of, validation_mask
from mamba3_lite.data.parts import Part, PartFiles, PartWriter, State
from mamba3_lite.data.progress import StageBar
from mamba3_lite.data.records import Ids, Record, Source, SourceConfig
from mamba3_lite.data.shards import dtype_for
from mamba3_lite.data.tokenizer import Tokenizer
from mamba3_lite.errors import UserError

# A part is what a killed run loses at most: some seconds of work.
PART_BYTES = 64 << 20
PART_RECORDS = 200_000

_BATCH_CHARS = 1 << 19
_BATCH_TEXTS = 1024
_MAX_LOGGED = 10


@dataclass
class Batch:
    """Some documents of a part, as pieces of text or as ids.

    `ends` tells for each piece whether its document ends with it.
    """

    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    arrays: list[Ids] = field(default_factory=list)
    chars: int = 0

    def add(self, content: str | Ids, *, ends: bool) -> None:
        """The next piece of a document's text, or all of its ids; `ends`: nothing follows."""
        if isinstance(content, str):
            self.texts.append(content)
            self.ends.append(ends)
            self.chars += len(content)
        else:
            self.arrays.append(content)

    @property
    def is_full(self) -> bool:
        """Whether a worker should have it now."""
        return self.chars >= _BATCH_CHARS or len(self.texts) + len(self.arrays) >= _BATCH_TEXTS


@dataclass
class Tally:
    """What was read for one part, and what its documents leave for those after them."""

    next_ordinal: int
    records: int = 0
    read_bytes: int = 0
    text_bytes: int = 0
    repaired: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    keys: set[bytes] = field(default_factory=set)
    signatures: list[bytes] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether the part ends here."""
        return self.records >= PART_RECORDS or self.read_bytes >= PART_BYTES


@dataclass
class _Progress:
    """How far a source is, from its finished parts."""

    number: int = 0
    next_ordinal: int = 0
    train: int = 0
    val: int = 0
    exhausted: bool = False
    skipped: Counter[str] = field(default_factory=Counter)

    def count(self, part: Part, exhausted: bool) -> None:
        """Add a finished part."""
        self.skipped.update(part.skipped)
        self.number, self.next_ordinal = part.number + 1, part.next_ordinal
        self.train += part.tokens - part.val_tokens
        self.val += part.val_tokens
        self.exhausted = exhausted


class Ingest:
    """Reads `sources` into finished parts until every one has run out or given enough."""

    def __init__(
        self,
        job: PrepareJob,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        state: State,
        log: Callable[[str], None],
    ) -> None:
        self._job = job
        self._sources = sources
        self._tokenizer = tokenizer
        self._state = state
        self._log = log
        self._logged = 0
        self._near = NearDuplicates(job.dedup.near_threshold) if job.dedup.near else None
        self._records: dict[int, Iterator[Record]] = {}
        self._so_far = [_Progress() for _ in sources]
        for config, so_far in zip(job.sources, self._so_far, strict=True):
            for part in state.parts(config.name):
                so_far.count(part, state.is_finished(config.name))

    def run(self, pool: EncoderPool[Batch], bar: StageBar) -> None:
        """Write parts until there are enough; each is committed before the next begins."""
        if self._near is not None:
            self._near.restore(self._state.signatures())
        while (number := self.next_source()) is not None:
            self._write_part(number, pool, bar)

    def next_source(self) -> int | None:
        """The source that the next part comes from; None when all have given enough."""
        for number, (so_far, (train, val)) in enumerate(
            zip(self._so_far, self._needed(), strict=True)
        ):
            if not so_far.exhausted and (so_far.train < train or so_far.val < val):
                return number
        return None

    def _needed(self) -> list[tuple[float, float]]:
        """(training, validation) tokens of each source that are enough."""
        prepare = self._job.prepare
        if not prepare.max_tokens:
            return [(float("inf"), 0.0)] * len(self._sources)
        weights = [config.weight for config in self._job.sources]
        exhausted = [so_far.exhausted for so_far in self._so_far]
        policy = cast(OnExhausted, prepare.on_exhausted)
        # Validation may get less than its share, and training then more than the rest.
        train = tokens_needed(
            [so_far.train for so_far in self._so_far],
            exhausted,
            weights,
            prepare.max_tokens,
            policy,
        )
        budget = val_budget_of(prepare.max_tokens, prepare.val_fraction) or 0
        val = tokens_needed(
            [so_far.val for so_far in self._so_far], exhausted, weights, budget, policy
        )
        return list(zip(map(float, train), map(float, val), strict=True))

    def _write_part(self, number: int, pool: EncoderPool[Batch], bar: StageBar) -> None:
        so_far, config = self._so_far[number], self._job.sources[number]
        tally = Tally(so_far.next_ordinal)
        with PartWriter(
            self._state.work / config.name,
            so_far.number,
            dtype=dtype_for(self._tokenizer.vocab_size),
            eos_id=self._tokenizer.eos_id,
        ) as writer:
            batches = self._batches(number, tally)
            for batch, encoded in pool.map((batch, batch.texts) for batch in batches):
                before = writer.tokens
                for ids, ends in zip(encoded, batch.ends, strict=True):
                    writer.add(ids, ends=ends)
                for ids in batch.arrays:
                    writer.add(ids, ends=True)
                tally.text_bytes += encoded.text_bytes
                bar.advance(
                    documents=sum(batch.ends) + len(batch.arrays),
                    text_bytes=encoded.text_bytes,
                    tokens=writer.tokens - before,
                    completed=sum(source.bytes_read for source in self._sources),
                )
            last = not tally.is_full
            if last and not (so_far.train + so_far.val + writer.tokens):
                raise _no_document(config, so_far.skipped + tally.skipped)
            part = self._part_of(config.name, so_far.number, tally, writer.finish())
        if last:
            self._check_splits(config, so_far, part)
        self._state.commit(part, last=last, keys=tally.keys, signatures=tally.signatures)
        so_far.count(part, last)

    def _check_splits(self, config: SourceConfig, so_far: _Progress, part: Part) -> None:
        """Refuse early what packing could not do: keep the weights where a source has nothing."""
        prepare = self._job.prepare
        if prepare.val_fraction == 0 or (
            prepare.on_exhausted == "continue" and len(self._sources) > 1
        ):
            return
        train = so_far.train + part.tokens - part.val_tokens
        for split, tokens in (("train", train), ("val", so_far.val + part.val_tokens)):
            if not tokens:
                raise UserError(
                    f"val_fraction {prepare.val_fraction}: of the documents of source "
                    f"{config.name!r} none falls into {split}; change the fraction or add documents"
                )

    def _part_of(self, name: str, number: int, tally: Tally, written: PartFiles) -> Part:
        prepare, documents = self._job.prepare, written.documents
        in_val = validation_mask(
            documents["key"], seed=prepare.seed, val_fraction=prepare.val_fraction
        )
        return Part(
            source=name,
            number=number,
            next_ordinal=tally.next_ordinal,
            records=tally.records,
            documents=len(documents),
            tokens=int(documents["length"].sum()),
            val_documents=int(in_val.sum()),
            val_tokens=int(documents["length"][in_val].sum()),
            text_bytes=tally.text_bytes,
            read_bytes=tally.read_bytes,
            repaired=tally.repaired,
            tokens_sha256=written.tokens_sha256,
            documents_sha256=written.documents_sha256,
            skipped=dict(sorted(tally.skipped.items())),
        )

    def _batches(self, number: int, tally: Tally) -> Iterator[Batch]:
        """The documents of the next part.

        A batch may end within a document: a text of 40 MB would keep one worker busy alone.
        """
        batch = Batch()
        for content, ends in self._contents(number, tally):
            batch.add(content, ends=ends)
            if batch.is_full:
                yield batch
                batch = Batch()
        if batch.texts or batch.arrays:
            yield batch

    def _contents(self, number: int, tally: Tally) -> Iterator[tuple[str | Ids, bool]]:
        """Pieces of text, or ids, of the next part; each with whether its document ends there.

        The iterator over the records stays open: the part after this one goes on with it.
        """
        if number not in self._records:
            self._records[number] = self._sources[number].records(tally.next_ordinal)
        for record in self._records[number]:
            tally.records += 1
            tally.next_ordinal = record.ordinal + 1
            tally.read_bytes += record.size_bytes
            if self._is_wanted(record, tally):
                if record.ids is not None:
                    yield record.ids, True
                else:
                    *body, last = pieces_of(cast(str, record.text), self._tokenizer)
                    for piece in body:
                        yield piece, False
                    yield last, True
            if tally.is_full:
                break

    def _is_wanted(self, record: Record, tally: Tally) -> bool:
        """Whether the record becomes a document; if not, the reason is counted."""
        if record.problem is not None:
            tally.skipped[record.problem] += 1
            self._report(f"{record.origin}: {record.detail}; skipped")
            return False
        if record.repaired:
            tally.repaired += 1
            self._report(f"{record.origin}: {record.detail}; replaced by U+FFFD")
        reason = None
        if record.text is not None and self._job.clean.enabled:
            reason = reason_to_drop(record.text, self._job.clean)
        reason = reason or self._duplicate(record, tally)
        if reason:
            tally.skipped[reason] += 1
        return not reason

    def _duplicate(self, record: Record, tally: Tally) -> str | None:
        if record.ids is not None:
            self._check_ids(record)
        if self._job.dedup.exact:
            if record.ids is not None:
                key = hashlib.sha256(record.ids.tobytes()).digest()[:16]
            else:
                key = exact_key(cast(str, record.text))
            if key in tally.keys or self._state.has_seen(key):
                return "duplicate"
            tally.keys.add(key)
        if self._near is not None and record.text is not None:
            signature = near_signature(record.text)
            if self._near.is_duplicate_signature(signature):
                return "near_duplicate"
            tally.signatures.append(signature)
        return None

    def _check_ids(self, record: Record) -> None:
        """Ids come from outside: they may belong to another tokenizer."""
        ids = cast(Ids, record.ids)
        tokenizer = self._tokenizer
        if ids.size and int(ids.max()) >= tokenizer.vocab_size:
            raise UserError(
                f"{record.origin}: token id {int(ids.max())} is outside 0.."
                f"{tokenizer.vocab_size - 1} of tokenizer {tokenizer.name}; name the tokenizer "
                "that the ids come from"
            )
        if np.any(ids == tokenizer.eos_id):
            raise UserError(
                f"{record.origin}: the end-of-document id {tokenizer.eos_id} stands inside a "
                "document; set eos_id of the source to it"
            )

    def _report(self, message: str) -> None:
        self._logged += 1
        if self._logged <= _MAX_LOGGED:
            self._log(f"[prepare] {message}")
        elif self._logged == _MAX_LOGGED + 1:
            self._log("[prepare] further problems are only counted")


def _no_document(config: SourceConfig, skipped: Counter[str]) -> UserError:
    counts = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "none"
    more = f" (and {len(config.paths) - 1} more)" if len(config.paths) > 1 else ""
    where = config.paths[0] + more if config.paths else config.dataset
    return UserError(
        f"source {config.name!r}, {where}: holds no document with text (skipped: {counts}); name "
        "files that hold text"
    )
