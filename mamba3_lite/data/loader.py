"""From a global sample number to a batch: the order of windows, skipped spans, and the loader.

The stream of samples is infinite and does not depend on the batch size: sample k is window k of
epoch 0, then epoch 1 follows without a gap and without a dropped tail. The resume position is one
integer, the number of the next sample.
"""

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from mamba3_lite.data.dataset import WindowDataset
from mamba3_lite.errors import UserError

ORDERS = ("sequential", "shuffled")
Span = tuple[int, int]

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SampleOrder:
    """Which window a global sample number means; `order` is "sequential" or "shuffled".

    Shuffled: every epoch is its own permutation of all windows, keyed by (seed, epoch) and computed
    number by number, never stored. The permutation is a part of the resume contract.
    """

    n_windows: int
    order: str = "sequential"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UserError(f"data order {self.order!r} is not known; use {' or '.join(ORDERS)}")
        if self.n_windows < 1:
            raise ValueError(f"n_windows must be at least 1, not {self.n_windows}")

    def epoch(self, sample: int) -> int:
        """The epoch (from 0) in which `sample` lies."""
        return sample // self.n_windows

    def window(self, sample: int) -> int:
        """The window (0..n_windows-1) of `sample`."""
        epoch, index = divmod(sample, self.n_windows)
        if self.order == "sequential":
            return index
        return _permute(index, self.n_windows, _round_keys(self.seed, epoch))


def next_sample(sample: int, skip_spans: Sequence[Span] = ()) -> int:
    """The first sample at or after `sample` outside every span [start, stop)."""
    for start, stop in sorted(skip_spans):
        if start <= sample < stop:
            sample = stop
    return sample


def advance(sample: int, count: int, skip_spans: Sequence[Span] = ()) -> int:
    """The position after `count` samples have been drawn from position `sample` on.

    That is one past the last drawn sample (`sample` itself for count 0); spans are jumped over only
    when a sample behind them is drawn.
    """
    for start, stop in sorted(skip_spans):
        free = max(0, start - sample)
        if count <= free:
            break
        if stop > sample:
            count -= free
            sample = stop
    return sample + count


class StreamBatchSampler(Sampler[list[int]]):
    """Lists of `batch_size` window indices, for ever, from global sample `start_sample` on.

    With several ranks the global stream is dealt out like cards: rank r gets samples r,
    r + world_size, ... counted from `start_sample`, so the ranks' batches are disjoint and their
    union is the stream of one rank with a batch world_size times as large.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        start_sample: int,
        batch_size: int,
        skip_spans: Sequence[Span] = (),
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.order = order
        self.start_sample = start_sample
        self.batch_size = batch_size
        self.skip_spans = tuple(skip_spans)
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[list[int]]:
        mine = itertools.islice(self._samples(), self.rank, None, self.world_size)
        while True:
            yield [self.order.window(s) for s in itertools.islice(mine, self.batch_size)]

    def _samples(self) -> Iterator[int]:
        sample = self.start_sample
        while True:
            sample = next_sample(sample, self.skip_spans)
            yield sample
            sample += 1


def make_loader(
    dataset: WindowDataset,
    order: SampleOrder,
    *,
    start_sample: int,
    batch_size: int,
    skip_spans: Sequence[Span] = (),
    num_workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[Tensor, ...]]:
    """Batches for ever: what the dataset's items hold, each int64 (batch_size, max_seq_len).

    `prefetch` batches are read ahead, by each of `num_workers` processes or, without any, by one
    thread. The stream depends on `order`, `start_sample`, `skip_spans` and the rank only, and
    nothing here draws from a global random generator.
    """
    sampler = StreamBatchSampler(
        order,
        start_sample=start_sample,
        batch_size=batch_size,
        skip_spans=skip_spans,
        rank=rank,
        world_size=world_size,
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        collate_fn=_collate,
        # Without its own generator every new iterator draws from torch's global one, and a
        # resumed run would no longer equal an uninterrupted one.
        generator=torch.Generator(),
    )
    return _from_workers(loader) if num_workers else _from_thread(loader, prefetch)


def _from_workers(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    try:
        yield from loader
    except UserError as problem:
        # torch puts the worker's traceback in front of the message.
        message = str(problem).rpartition("UserError: ")[2].rstrip()
        # Its traceback is in a cycle with the workers; collecting that later would take seconds.
        problem.__traceback__ = None
    del loader
    raise UserError(message)


def _from_thread(
    loader: DataLoader[tuple[Tensor, ...]], prefetch: int
) -> Iterator[tuple[Tensor, ...]]:
    """What the loader gives, read `prefetch` batches ahead while the caller computes.

    The thread ends with the iterator. An error is raised at the batch that it belongs to.
    """
    batches = iter(loader)
    set_up = None
    if torch.cuda.is_initialized():
        # A new thread starts on device 0, where every rank would then pin its memory.
        set_up = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    pool = ThreadPoolExecutor(1, "data", initializer=set_up)
    try:
        pending = deque(pool.submit(next, batches) for _ in range(prefetch))
        while True:
            pending.append(pool.submit(next, batches))
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _collate(items: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    # numpy copies in this thread alone; torch would start threads that compete with the model's.
    columns = zip(*items, strict=True)
    return tuple(torch.from_numpy(np.stack([t.numpy() for t in column])) for column in columns)


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def _permute(index: int, n: int, keys: tuple[int, ...]) -> int:
    """A keyed permutation of 0..n-1: a Feistel network on the next even number of bits.

    Results beyond n-1 are fed in again (cycle walking); the domain is under 4n, so that takes four
    turns at most on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = (left << half) | right
        if index < n:
            return index


def _mix(value: int) -> int:
    """Scramble 64 bits: the xor-shift-multiply finaliser of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
