"""Documents to score, out of shards or texts, with the exact number of bytes of their text."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mamba3_lite.data.inspect import Inspection
from mamba3_lite.data.records import SourceConfig
from mamba3_lite.data.shards import MANIFEST
from mamba3_lite.data.sources import open_source
from mamba3_lite.data.tokenizer import (
    GPT2_EOS_ID,
    Gpt2Tokenizer,
    Tokenizer,
    fingerprint_of,
    gpt2_encoding,
)
from mamba3_lite.errors import UserError, reading
from mamba3_lite.evaluation.scoring import Ids
from mamba3_lite.evaluation.subject import Subject


class Document(NamedTuple):
    """Token ids (n,), the EOS at the end included, and the bytes of the text in UTF-8."""

    ids: Ids
    size_bytes: int


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again.

    Attributes:
        name: for people.
        tokens: how many there are, EOS included; None where only reading tells.
        facts: where the documents come from and how they were tokenized, ready for JSON.
    """

    name: str
    documents: Callable[[], Iterator[Document]]
    eos_id: int
    tokens: int | None
    facts: dict[str, Any]


def shard_corpus(path: str | Path, subject: Subject, *, tokenizer: str | None = None) -> Corpus:
    """The documents of token data; of an output of ``prepare`` the validation split, if any.

    Args:
        tokenizer: the one they were made with; None: what the data name, else the model's.

    Raises:
        UserError: data that cannot be read, that are empty, or whose vocabulary or tokenizer is
            not the model's.
    """
    path = Path(path)
    with reading(f"data path {path}", "correct the path or its permissions"):
        if (path / "val" / MANIFEST).is_file():
            path = path / "val"
    data = Inspection(path, tokenizer=tokenizer, fallback=subject.tokenizer_name)
    _check_vocabulary(data, subject)
    count = _byte_counter(data.tokenizer, data.eos_id)

    def documents() -> Iterator[Document]:
        for start, length in zip(data.starts.tolist(), data.lengths.tolist(), strict=True):
            ids = data.stream.read(start, start + length)
            yield Document(ids, count(ids))

    facts = {
        "paths": [str(path)], "tokenizer": data.tokenizer.name,
        "tokenizer_sha256": data.tokenizer.fingerprint,
    }  # fmt: skip
    return Corpus(str(path), documents, data.eos_id, data.tokens, facts)


def _check_vocabulary(data: Inspection, subject: Subject) -> None:
    known, header = subject.scorer.model.cfg.vocab_size, data.stream.header
    written_with = data.tokenizer.vocab_size if header is None else header.vocab_size
    if written_with > known:
        raise UserError(
            f"{data.stream.path}: written with a vocabulary of {written_with:,} ids, more than the "
            f"model's {known:,}; name data made with the model's tokenizer."
        )
    trained_with = subject.tokenizer_name
    # The tokenizer of an export is another file with the same ids.
    if header is None or not subject.training:
        return
    if header.tokenizer_sha256 != fingerprint_of(trained_with):
        raise UserError(
            f"{data.stream.path}: made with another tokenizer ({data.tokenizer.name!r}) than the "
            f"model was trained with ({trained_with!r}); their ids mean different texts. Prepare "
            "the data with the model's."
        )


def _byte_counter(tokenizer: Tokenizer, eos_id: int) -> Callable[[Ids], int]:
    """Counts the bytes of the text of ids (n,), in which an EOS has none."""
    if isinstance(tokenizer, Gpt2Tokenizer):
        table = _gpt2_bytes()
        return lambda ids: int(table[ids].sum())
    return lambda ids: len(tokenizer.decode(ids[ids != eos_id].tolist()).encode())


@functools.cache
def _gpt2_bytes() -> Ids:
    """Bytes of every GPT-2 token: they are whole bytes, though not always whole characters."""
    encoding = gpt2_encoding()
    return np.array(
        [len(encoding.decode_single_token_bytes(i)) for i in range(GPT2_EOS_ID)] + [0], np.int64
    )


def text_corpus(files: Sequence[str], subject: Subject, *, field: str = "text") -> Corpus:
    """Files of text, a document each, or of JSON lines, a document a line.

    Args:
        field: of a JSON line, what holds the text.

    Raises:
        UserError: a file that cannot be read. One that holds no text, or none that is UTF-8, is
            refused when its turn comes.
    """
    tokenizer = subject.tokenizer
    sources = [_text_source(name, field) for name in files]

    def documents() -> Iterator[Document]:
        for source in sources:
            found = False
            for record in source.records():
                if record.text is None:
                    problem = record.detail or "holds token ids, which --data reads"
                    raise UserError(f"{record.origin}: {problem}; mend it or leave it out.")
                found = True
                ids = np.array([*tokenizer.encode(record.text), tokenizer.eos_id], np.int64)
                yield Document(ids, len(record.text.encode()))
            if not found:
                raise UserError(f"{source.config.name}: holds no text; leave it out.")

    name = files[0] if len(files) == 1 else f"{len(files)} files"
    facts = {
        "paths": list(files), "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.fingerprint,
    }  # fmt: skip
    return Corpus(name, documents, tokenizer.eos_id, None, facts)


def _text_source(name: str, field: str):
    if Path(name).is_dir():
        raise UserError(f"--text {name} is a folder; name its files.")
    config = SourceConfig(name=name, paths=(name,), field=field, suffixes=("*",))
    # A bad text becomes a record that says so, and our own words for it.
    return open_source(config, invalid_utf8="skip")
