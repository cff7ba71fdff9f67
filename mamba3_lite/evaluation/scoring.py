"""How likely given tokens are: any lengths, in batches that fill the device.

Legend: R rows of a batch, C columns of a piece, K tokens that are scored, V vocabulary.

A batch is read in pieces of C columns with the state carried, so a passage may be of any length.
Padding stands at the right of its row: nothing that counts comes after it, so it reaches neither a
score nor a state that is read again.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mamba3_lite.errors import UserError
from mamba3_lite.inference.sampling import not_finite
from mamba3_lite.models.transformer import Mamba3Transformer

Ids = np.ndarray[Any, Any]

# Tokens of a forward pass, padding included: enough to fill the device, and a bound on memory.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65_536}
# Very short passages would otherwise make batches of thousands of rows, each with chunks that are
# all but empty.
_MAX_ROWS = 512
# Passages are sorted by length within so many batches: little padding, and memory stays bounded.
_POOL_BATCHES = 32
# Float32 logits that exist at once: 1 GiB on a GPU; on a CPU so few that an allocator keeps their
# memory, for new pages cost as much as the softmax.
_LOGITS = {"cpu": 2**22, "cuda": 2**28}
# Off a 16-byte boundary, rows of logits make the head's product several times slower on a GPU.
_VOCAB_MULTIPLE = 128


class Passage(NamedTuple):
    """Token ids (n,) to read, of which ``ids[first:]`` are scored; ``first`` is 1 or more."""

    ids: Ids
    first: int

    @property
    def scored(self) -> int:
        """How many tokens are scored."""
        return max(0, len(self.ids) - self.first)


class Scored(NamedTuple):
    """Neighbouring tokens of one passage.

    Attributes:
        passage: which one, in the order given.
        begin: place in the passage of the first of them, that is how many were read before it.
        ids: the tokens (k,).
        losses: -log p of each, in nat (k,) float64.
        greedy: whether each was the likeliest (k,) bool; None unless asked for.
    """

    passage: int
    begin: int
    ids: Ids
    losses: Ids
    greedy: Ids | None


class _Span(NamedTuple):
    """Tokens of a passage that are under way on the device."""

    passage: int
    begin: int
    ids: Ids


class _Launched(NamedTuple):
    """Results on their way to the host."""

    spans: list[_Span]
    losses: Tensor
    greedy: Tensor | None
    arrival: "torch.cuda.Event | None"

    def read(self) -> Iterator[Scored]:
        if self.arrival is not None:
            self.arrival.synchronize()
        losses = self.losses.numpy().astype(np.float64)
        if not np.isfinite(losses).all():
            raise not_finite()
        start = 0
        for span in self.spans:
            part = slice(start, start := start + len(span.ids))
            greedy = None if self.greedy is None else self.greedy.numpy()[part]
            yield Scored(*span, losses[part], greedy)


class Scorer:
    """A model that scores passages.

    Args:
        dtype: float32, or bfloat16 for autocast; logits and losses are float32 in either.
        batch_tokens: tokens of a forward pass, padding included; None: by the device.
        batch_size: passages read together; None: as many as ``batch_tokens`` holds.
    """

    def __init__(
        self,
        model: Mamba3Transformer,
        *,
        dtype: torch.dtype = torch.float32,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ):
        self.model, self.dtype, self.batch_size = model, dtype, batch_size
        self.device = model.embed.weight.device
        self._kind = "cuda" if self.device.type == "cuda" else "cpu"
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self._kind]
        self._head = self._head_weight()

    def score(self, passages: Iterable[Passage], *, greedy: bool = False) -> Iterator[Scored]:
        """Every scored token once, in an order that serves the device.

        Raises:
            UserError: an id outside the vocabulary, or logits that are not finite.
        """
        waiting = None
        for launched in self._launches(passages, greedy):
            # Read one piece late: the device is given the next before the host waits for this one.
            if waiting is not None:
                yield from waiting.read()
            waiting = launched
        if waiting is not None:
            yield from waiting.read()

    def _launches(self, passages: Iterable[Passage], greedy: bool) -> Iterator[_Launched]:
        for batch in self._batches(passages):
            longest = len(batch[0][1].ids) - 1
            columns = max(1, self.batch_tokens // len(batch))
            state: list[Tensor] | None = None
            for start in range(0, longest, columns):
                stop = min(start + columns, longest)
                # Rows that have ended lie behind the others, and are left out.
                batch = [item for item in batch if len(item[1].ids) - 1 > start]
                state = None if state is None else [layer[: len(batch)] for layer in state]
                inputs, places, spans = self._piece(batch, start, stop)
                hidden, state = self._read(inputs, state, return_state=stop < longest)
                if spans:
                    yield self._launch(hidden, places, spans, greedy)

    def _batches(self, passages: Iterable[Passage]) -> Iterator[list[tuple[int, Passage]]]:
        """(index, passage) of neighbours in length, the longest first."""
        pool: list[tuple[int, Passage]] = []
        held = 0
        for index, passage in enumerate(passages):
            if passage.scored:
                self._check(passage.ids)
                pool.append((index, passage))
                held += len(passage.ids)
            if held >= _POOL_BATCHES * self.batch_tokens:
                yield from self._cut(pool)
                pool, held = [], 0
        yield from self._cut(pool)

    def _check(self, ids: Ids) -> None:
        vocab = self.model.cfg.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise UserError(
                f"a text holds a token id outside 0 to {vocab - 1}, the model's vocabulary; use "
                "the tokenizer that the model was trained with (--tokenizer)."
            )

    def _cut(self, pool: list[tuple[int, Passage]]) -> Iterator[list[tuple[int, Passage]]]:
        pool.sort(key=lambda item: -len(item[1].ids))
        start = 0
        while start < len(pool):
            fitting = self.batch_tokens // (len(pool[start][1].ids) - 1)
            rows = self.batch_size or min(max(1, fitting), _MAX_ROWS)
            yield pool[start : start + rows]
            start += rows

    def _piece(
        self, batch: Sequence[tuple[int, Passage]], start: int, stop: int
    ) -> tuple[Ids, Ids, list[_Span]]:
        """Inputs (R, C), places (K,) in the flat inputs of what is scored, and what that is."""
        width = stop - start
        inputs = np.zeros((len(batch), width), np.int64)
        places, spans = [np.empty(0, np.int64)], []
        for row, (index, passage) in enumerate(batch):
            ids, end = passage.ids, min(stop, len(passage.ids) - 1)
            inputs[row, : end - start] = ids[start:end]
            begin = max(start, passage.first - 1)
            if begin < end:
                places.append(row * width + np.arange(begin - start, end - start))
                spans.append(_Span(index, begin + 1, ids[begin + 1 : end + 1]))
        return inputs, np.concatenate(places), spans

    def _read(
        self, inputs: Ids, state: list[Tensor] | None, *, return_state: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """What the head reads (R, C, d_model), and the state if it is wanted."""
        with torch.no_grad(), self._precision():
            out = self.model.hidden(self._on_device(inputs), state=state, return_state=return_state)
        return out if return_state else (out, None)

    def _precision(self) -> AbstractContextManager:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _on_device(self, values: Ids) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._kind == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    @torch.no_grad()
    def _launch(self, hidden: Tensor, places: Ids, spans: list[_Span], greedy: bool) -> _Launched:
        rows = hidden.flatten(0, 1)[self._on_device(places)].to(self._head.dtype)
        targets = self._on_device(np.concatenate([span.ids for span in spans]).astype(np.int64))
        losses, hits = [], []
        size = max(1, _LOGITS[self._kind] // len(self._head))
        for h, t in zip(rows.split(size), targets.split(size), strict=True):
            logits = self._logits(h)
            losses.append(F.cross_entropy(logits, t, reduction="none"))
            if greedy:
                hits.append(logits.argmax(-1) == t)
        to_host = [
            torch.cat(found).to("cpu", non_blocking=True) if found else None
            for found in (losses, hits)
        ]
        arrival = None
        if self._kind == "cuda":
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(self.device))
        assert to_host[0] is not None
        return _Launched(spans, to_host[0], to_host[1], arrival)

    def _head_weight(self) -> Tensor:
        """(V, d_model) in the dtype that is computed in; on a GPU with rows of zeros below."""
        weight = self.model.lm_head.weight.detach().to(self.dtype)
        missing = -len(weight) % _VOCAB_MULTIPLE if self._kind == "cuda" else 0
        return F.pad(weight, (0, 0, 0, missing)) if missing else weight

    def _logits(self, hidden: Tensor) -> Tensor:
        """(K, d_model) -> (K, V) float32, V padded; padding has no probability."""
        if self.dtype == torch.float32:
            logits = hidden @ self._head.T
        elif self._kind == "cuda":
            # Logits rounded to bf16 would tie, and each loss would be off by up to 0.03.
            logits = torch.mm(hidden, self._head.T, out_dtype=torch.float32)
        else:
            logits = hidden.float() @ self._head.float().T
        logits[:, self.model.cfg.vocab_size :] = -torch.inf
        return logits
