"""Token files as sources: raw EOS-separated uint32 records, and `torch.save`d int64 tensors.

A document is what lies between two EOS ids; the end of a file ends one too.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mamba3_lite.data.records import Ids, Problem, Raw, Reader, Record
from mamba3_lite.errors import UserError

if TYPE_CHECKING:
    from mamba3_lite.data.dataset import TokenStream

_BLOCK_TOKENS = 1 << 22
# A shard of 50 million tokens without any EOS is one long document; far beyond that, the EOS id
# must be wrong, and the file would have to be held whole.
_MAX_DOCUMENT_TOKENS = 1 << 26
_ID_LIMIT = 1 << 32


class TokenReader(Reader):
    """Documents of ids out of blocks of ids."""

    @abstractmethod
    def blocks(self) -> Iterator[Ids]:
        """The ids of the file in order; keeps `position` up to date."""

    def raw(self, skip: int) -> Iterator[tuple[int, Raw]]:
        number = 0
        pending: list[Ids] = []
        held = 0
        for block in self.blocks():
            begin = 0
            for end in np.flatnonzero(block == self.config.eos_id).tolist():
                yield number, self._raw(number, [*pending, block[begin:end]])
                pending, held, begin = [], 0, end + 1
                number += 1
            if begin < len(block):
                pending.append(block[begin:])
                held += len(block) - begin
                self._check_length(number, held)
        if pending:
            yield number, self._raw(number, pending)

    def parse(self, ordinal: int, raw: Raw) -> Record:
        ids = raw.content
        if not len(ids):
            raise Problem("empty", "no token before the EOS")
        if int(ids.min()) < 0 or int(ids.max()) >= _ID_LIMIT:
            raise Problem("id_out_of_range", f"an id outside 0..{_ID_LIMIT - 1}")
        return Record(ordinal, raw.origin, None, ids.astype(np.uint32), None, raw.size_bytes)

    def _raw(self, number: int, parts: list[Ids]) -> Raw:
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Raw(f"{self.path}[{number}]", ids, ids.nbytes)

    def _check_length(self, number: int, held: int) -> None:
        if held > _MAX_DOCUMENT_TOKENS:
            raise UserError(
                f"{self.path}: document {number} has no EOS id {self.config.eos_id} within "
                f"{held:,} tokens; correct eos_id"
            )


class Uint32Reader(TokenReader):
    """A file of little-endian uint32 ids."""

    def check(self) -> None:
        if self.size % 4:
            raise UserError(
                f"{self.path}: {self.size} bytes are no whole number of uint32 ids; copy the file "
                "anew, or set kind to what it holds"
            )

    def blocks(self) -> Iterator[Ids]:
        with self.path.open("rb") as file:
            while len(block := np.fromfile(file, "<u4", _BLOCK_TOKENS)):
                self.position += block.nbytes
                yield block


class TorchReader(TokenReader):
    """A file that holds one `torch.save`d int64 tensor (n,)."""

    def check(self) -> None:
        self._n_tokens()

    def blocks(self) -> Iterator[Ids]:
        n_tokens = self._n_tokens()
        for start in range(0, n_tokens, _BLOCK_TOKENS):
            stop = min(start + _BLOCK_TOKENS, n_tokens)
            self.position = self.size * stop // n_tokens
            # Opened anew for each block: a mapping kept open would grow with what was read of it.
            yield self._stream().read(start, stop)

    def _n_tokens(self) -> int:
        stream = self._stream()
        if stream.header is not None:
            raise UserError(f"{self.path}: is prepared already; train on it as it is")
        return stream.n_tokens

    def _stream(self) -> "TokenStream":
        # torch takes seconds to import, and few sources need it.
        from mamba3_lite.data.dataset import TokenStream

        return TokenStream(self.path)
