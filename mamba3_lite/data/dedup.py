"""Duplicate documents: exact ones by hash, near ones by MinHash (Broder 1997) and LSH bands."""

import functools
import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from mamba3_lite.data.records import extra_missing
from mamba3_lite.errors import UserError

Signature = np.ndarray[Any, Any]

_KEY_BYTES = 16
_N_HASHES = 128
_SEED = 1
_RUN_WORDS = 5
_WORD = re.compile(r"\w+")


def exact_key(text: str) -> bytes:
    """The first 16 bytes of the SHA-256 of the text's UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).digest()[:_KEY_BYTES]


def near_signature(text: str) -> bytes:
    """The MinHash of the text's runs of 5 words, lower case: 128 little-endian uint32.

    The share of equal numbers in two signatures estimates the Jaccard similarity of the runs.
    Depends on the text alone, so any process may compute it. `UserError`: the extra is missing.
    """
    words = _WORD.findall(text.lower())
    n_runs = max(1, len(words) - _RUN_WORDS + 1)
    runs = {" ".join(words[i : i + _RUN_WORDS]) for i in range(n_runs)}
    sketch = _empty_sketch().copy()
    sketch.update_batch([run.encode("utf-8") for run in runs])
    return np.asarray(sketch.hashvalues).astype("<u4").tobytes()


class NearDuplicates:
    """Remembers the documents that were kept, and tells those that nearly repeat one of them.

    A document is a duplicate when its estimated similarity to a kept one is at least `threshold`.
    The answer depends on the documents kept so far, so documents must come in a fixed order.
    Memory grows by some kilobytes a document. `UserError`: a threshold outside 0.1..0.95, the extra
    is missing.
    """

    def __init__(self, threshold: float) -> None:
        if not 0.1 <= threshold <= 0.95:
            raise UserError(f"dedup.near_threshold must be between 0.1 and 0.95, not {threshold}")
        self.threshold = threshold
        self._empty = _empty_sketch()
        self._kept: list[Signature] = []
        self._index = _datasketch().MinHashLSH(threshold, _N_HASHES)

    def __len__(self) -> int:
        """The number of documents kept."""
        return len(self._kept)

    def is_duplicate(self, text: str) -> bool:
        """Whether the text nearly repeats a kept one; otherwise it is kept."""
        return self.is_duplicate_signature(near_signature(text))

    def is_duplicate_signature(self, signature: bytes) -> bool:
        """`is_duplicate` of the text that has this `near_signature`."""
        values, sketch = self._sketch(signature)
        for number in self._index.query(sketch):
            if np.mean(self._kept[number] == values) >= self.threshold:
                return True
        self._keep(values, sketch)
        return False

    def restore(self, signatures: Iterable[bytes]) -> None:
        """Keep documents that an earlier run kept, by their signatures, without comparing them."""
        for signature in signatures:
            self._keep(*self._sketch(signature))

    def _sketch(self, signature: bytes) -> tuple[Signature, Any]:
        values = np.frombuffer(signature, "<u4")
        sketch = self._empty.copy()
        sketch.hashvalues = values
        return values, sketch

    def _keep(self, values: Signature, sketch: Any) -> None:
        self._index.insert(len(self._kept), sketch)
        self._kept.append(values)


@functools.cache
def _empty_sketch() -> Any:
    # The scheme is named because signatures outlive the process, and with it the default.
    return _datasketch().MinHash(_N_HASHES, _SEED, scheme="affine32")


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError as exc:
        raise extra_missing("dedup.near", "datasketch", "dedup") from exc
    return datasketch
