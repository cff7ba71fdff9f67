"""Texts to token ids in worker processes, with the results in order.

What comes out does not depend on the number of processes, only when it comes.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from mamba3_lite import env
from mamba3_lite.data.shards import dtype_for
from mamba3_lite.data.tokenizer import (
    Gpt2Tokenizer,
    Tokenizer,
    gpt2_encoding,
    load_tokenizer,
    split_text,
)
from mamba3_lite.errors import UserError

Tag = TypeVar("Tag")

# Starting processes takes longer than tokenising this much.
_SERIAL_CHARS = 4 << 20
_AHEAD = 3

# A plain subprocess: multiprocessing would import the user's script again in every worker, and a
# fork would copy the locks of whatever threads torch has started.
_PROGRAM = "from mamba3_lite.data.encode import serve; serve()"
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Encoded:
    """The ids of several texts, one after another, `counts` (texts,) of each, no EOS."""

    ids: np.ndarray[Any, Any]
    counts: np.ndarray[Any, Any]
    text_bytes: int

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        start = 0
        for count in self.counts.tolist():
            yield self.ids[start : start + count]
            start += count


def usable_cores() -> int:
    """CPU cores that this process may use."""
    # Not on macOS.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pieces_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """`text` in pieces whose ids join to the ids of the whole.

    Only GPT-2's pattern is known to allow that; for other tokenizers the whole is the one piece.
    """
    return list(split_text(text)) if isinstance(tokenizer, Gpt2Tokenizer) else [text]


class _Worker:
    """A tokenising process, which ends when its standard input does."""

    def __init__(self, tokenizer: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, tokenizer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env.for_child(_ROOT),
        )

    def encode(self, texts: list[str]) -> "Encoded":
        """`encode_texts` over there; its exception, or `UserError` when the process died."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            pickle.dump(texts, stdin, pickle.HIGHEST_PROTOCOL)
            stdin.flush()
            result = pickle.load(stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as exc:
            raise UserError(
                "a tokenising process died (out of memory, or killed); run the same command again, "
                "with fewer workers if memory is short"
            ) from exc
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Let the process end, and wait for it."""
        self._process.kill()
        self._process.communicate()


class EncoderPool(Generic[Tag]):
    """Tokenise batches of texts in `workers` processes; a context manager.

    The processes start when there is enough work for them; 0 or 1 means none. They end with this
    process, however it ends.
    """

    def __init__(self, tokenizer: Tokenizer, *, workers: int) -> None:
        self._tokenizer = tokenizer
        self._n_workers = workers if workers > 1 else 0
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # One thread waits for each process.
        self._threads = ThreadPoolExecutor(max(self._n_workers, 1))
        self._chars = 0

    def __enter__(self) -> "EncoderPool[Tag]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def map(self, batches: Iterable[tuple[Tag, list[str]]]) -> Iterator[tuple[Tag, Encoded]]:
        """Each batch's tag with the ids of its texts, in the order of the batches.

        At most a few batches for each process are read ahead. `UserError` when a process dies.
        """
        waiting: deque[tuple[Tag, Future[Encoded]]] = deque()
        for tag, texts in batches:
            self._chars += sum(map(len, texts))
            if not self._n_workers or self._chars < _SERIAL_CHARS:
                yield tag, encode_texts(texts, self._tokenizer)
                continue
            self._start()
            waiting.append((tag, self._threads.submit(self._encode, texts)))
            while len(waiting) >= _AHEAD * self._n_workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for tag, future in waiting:
            yield tag, future.result()

    def _start(self) -> None:
        while len(self._workers) < self._n_workers:
            worker = _Worker(self._tokenizer.name)
            self._workers.append(worker)
            self._idle.put(worker)

    def _encode(self, texts: list[str]) -> Encoded:
        worker = self._idle.get()
        try:
            return worker.encode(texts)
        finally:
            self._idle.put(worker)


def encode_texts(texts: list[str], tokenizer: Tokenizer) -> Encoded:
    """Tokenise `texts`, made by `pieces_of`, here; ids as uint16 or uint32 after the vocabulary."""
    dtype = dtype_for(tokenizer.vocab_size)
    encode = _array_encoder(tokenizer)
    ids = [encode(text).astype(dtype, copy=False) for text in texts]
    return Encoded(
        np.concatenate([np.empty(0, dtype), *ids]),
        np.array([len(some) for some in ids], np.int64),
        sum(len(text.encode()) for text in texts),
    )


def _array_encoder(tokenizer: Tokenizer) -> Callable[[str], np.ndarray[Any, Any]]:
    """`tokenizer.encode` as an array; without a list of Python numbers it takes a fifth less."""
    if isinstance(tokenizer, Gpt2Tokenizer):
        encoding = gpt2_encoding()
        # Not in tiktoken before 0.9.
        if hasattr(encoding, "encode_to_numpy"):
            return partial(encoding.encode_to_numpy, disallowed_special=())
    return lambda text: np.array(tokenizer.encode(text), np.uint32)


def serve() -> None:
    """A worker process: lists of texts on standard input, `Encoded` of each on its output."""
    # Ctrl-C reaches the whole group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    # Whatever a library prints must not get among the results.
    sys.stdout = sys.stderr
    try:
        tokenizer = load_tokenizer(sys.argv[1])
        while True:
            texts = pickle.load(source)
            result: Encoded | Exception
            try:
                result = encode_texts(texts, tokenizer)
            except Exception as exc:
                exc.add_note(traceback.format_exc())
                result = exc
            pickle.dump(result, target, pickle.HIGHEST_PROTOCOL)
            target.flush()
    except (EOFError, BrokenPipeError):
        # The parent has ended, or needs no more.
        os._exit(0)
