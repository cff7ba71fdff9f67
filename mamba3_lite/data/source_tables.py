"""Tables as sources: Parquet files, and Hugging Face data sets in streaming mode."""

import contextlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from mamba3_lite.data.records import (
    InvalidUtf8,
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
    not_a_string,
    text_record,
    wrong_field,
)
from mamba3_lite.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet as pq

_BATCH_ROWS = 256


class ParquetReader(Reader):
    """Each row is a record; row groups are streamed, and only the text's columns are read."""

    def __init__(self, path: Path, config: SourceConfig, invalid_utf8: InvalidUtf8) -> None:
        super().__init__(path, config, invalid_utf8)
        self._n_rows = 0

    def check(self) -> None:
        fields = self.config.text_fields
        with self._open() as file:
            schema = file.schema_arrow
            self._n_rows = file.metadata.num_rows
        for field in fields:
            kind = _type_of(schema, field)
            if kind is None:
                raise wrong_field(str(self.path), fields, schema.names)
            if not _is_text(kind):
                raise UserError(
                    f"{self.path}: field {field!r} holds {kind}, not text; name a field of text"
                )

    def count(self) -> int:
        return self._n_rows

    def raw(self, skip: int) -> Iterator[tuple[int, Raw]]:
        fields = self.config.text_fields
        row = 0
        with self._open() as file:
            for group in range(file.num_row_groups):
                n_rows = file.metadata.row_group(group).num_rows
                if row + n_rows <= skip:
                    row += n_rows
                    continue
                for batch in file.iter_batches(_BATCH_ROWS, [group], list(fields)):
                    columns = [_binary(batch, field) for field in fields]
                    for values in zip(*columns, strict=True):
                        content = tuple(value.as_py() for value in values)
                        size = sum(len(value) for value in content if value is not None)
                        self.position = self.size * (row + 1) // self._n_rows
                        yield row, Raw(f"{self.path}[{row}]", content, size)
                        row += 1

    def parse(self, ordinal: int, raw: Raw) -> Record:
        for field, value in zip(self.config.text_fields, raw.content, strict=True):
            if value is None:
                raise not_a_string(field, value)
        mended = mend(b"\n\n".join(raw.content), self.policy, lambda _: raw.origin)
        return text_record(ordinal, raw, mended.text, mended)

    @contextlib.contextmanager
    def _open(self) -> "Iterator[pq.ParquetFile]":
        try:
            import pyarrow
            import pyarrow.parquet as pq
        except ImportError as exc:
            raise extra_missing(str(self.path), "pyarrow", "parquet") from exc
        try:
            with pq.ParquetFile(self.path) as file:
                yield file
        except (pyarrow.ArrowException, OSError) as exc:
            reason = str(exc).split("\n")[0]
            raise UserError(
                f"{self.path}: no Parquet file, or a damaged one ({reason}); copy it anew"
            ) from exc


def _type_of(schema: "pyarrow.Schema", field: str) -> "pyarrow.DataType | None":
    """The type of a field, dotted ones inside structures; None if there is none."""
    import pyarrow

    if field in schema.names:
        return schema.field(field).type
    head, *rest = field.split(".")
    kind = schema.field(head).type if rest and head in schema.names else None
    for name in rest:
        if kind is None or not pyarrow.types.is_struct(kind):
            return None
        index = kind.get_field_index(name)
        kind = kind.field(index).type if index >= 0 else None
    return kind


def _is_text(kind: "pyarrow.DataType") -> bool:
    """Text, bytes to be read as text, or a column of nothing but nulls."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.binary(),
        pyarrow.large_binary(),
        pyarrow.null(),
    )


def _binary(batch: "pyarrow.RecordBatch", field: str) -> "pyarrow.Array":
    """The column of a field as bytes: invalid UTF-8 in a text column is for the policy."""
    import pyarrow
    import pyarrow.compute

    if field in batch.schema.names:
        column = batch.column(field)
    else:
        head, *rest = field.split(".")
        column = pyarrow.compute.struct_field(batch.column(head), rest)
    return column.cast(pyarrow.large_binary())


class HubSource(Source):
    """The rows of a Hugging Face data set, streamed; nothing is downloaded as a whole.

    The revision is resolved to a commit first, so a resumed run reads the same data.
    """

    def __init__(self, config: SourceConfig, invalid_utf8: InvalidUtf8) -> None:
        super().__init__(config)
        self._policy = invalid_utf8
        if not config.dataset:
            raise UserError(f"source {config.name!r}: kind hf needs dataset, a data set's name")
        try:
            import datasets
            import huggingface_hub
        except ImportError as exc:
            raise extra_missing(
                f"source {config.name!r} (data set {config.dataset})", "datasets", "datasets"
            ) from exc
        with self._reached():
            info = huggingface_hub.HfApi().dataset_info(config.dataset, revision=config.revision)
            self._commit = info.sha or config.revision
            self._rows = datasets.load_dataset(
                config.dataset,
                config.subset or None,
                data_dir=config.data_dir or None,
                split=config.split,
                revision=self._commit,
                streaming=True,
            )
            first = next(iter(self._rows), None)
        fields = config.text_fields
        if first is not None and any(is_missing(lookup(first, field)) for field in fields):
            raise wrong_field(f"source {config.name!r}", fields, list(first))

    def fingerprint(self) -> str:
        config = self.config
        return f"{config.dataset}@{self._commit}:{config.subset}:{config.data_dir}:{config.split}"

    def total_bytes(self) -> None:
        return None

    def records(self, start: int = 0) -> Iterator[Record]:
        self.bytes_read = 0
        with self._reached():
            rows = iter(self._rows.skip(start) if start else self._rows)
        for ordinal in count(start):
            with self._reached():
                row = next(rows, None)
            if row is None:
                return
            raw = Raw(f"{self.config.dataset}[{ordinal}]", row, 0)
            yield finished(ordinal, raw, self._parse)

    def _parse(self, ordinal: int, raw: Raw) -> Record:
        text = joined_text(raw.content, self.config.text_fields)
        mended = mend(text, self._policy, lambda _: raw.origin)
        size = len(mended.text.encode())
        self.bytes_read += size
        return text_record(ordinal, raw._replace(size_bytes=size), mended.text, mended)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        # The libraries raise errors of many families for one cause, and this is all they do here.
        try:
            yield
        except Exception as exc:
            config = self.config
            reason = str(exc).strip().split("\n")[0] or type(exc).__name__
            raise UserError(
                f"source {config.name!r}: the data set {config.dataset} cannot be read "
                f"({reason}); run again when it can be reached (a run goes on where it stopped), "
                "or download its files and name them in this source: paths: [FOLDER] and kind: "
                "parquet (or jsonl, text)"
            ) from exc
