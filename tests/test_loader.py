import itertools
import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mamba3_lite.data.dataset import PretrainDataset, WindowDataset
from mamba3_lite.data.loader import ORDERS, SampleOrder, advance, make_loader, next_sample
from mamba3_lite.data.shards import ShardWriter
from mamba3_lite.errors import UserError

T = 4
PINNED = [9, 0, 3, 5, 4, 2, 7, 6, 8, 1]

ROOT = Path(__file__).resolve().parents[1]
# One run in three jobs: (ranks, batches of a rank). Three epochs end on the way.
JOBS = ((1, 2), (2, 2), (4, 3))
GLOBAL_BATCH = 8
SPANS = [(18, 23)]
CASES = [(order, workers) for order in ORDERS for workers in (0, 1, 4)]


@pytest.fixture
def data(tmp_path: Path) -> PretrainDataset:
    """Seven windows; the first token of window w is T * w."""
    torch.save(torch.arange(7 * T + 1), tmp_path / "data.bin")
    return PretrainDataset(tmp_path / "data.bin", T, 100)


def windows(data: PretrainDataset, order: SampleOrder, n_batches: int, **options: Any) -> list[int]:
    """Window numbers of the first batches, read off the tokens themselves."""
    seen = []
    for x, y in itertools.islice(make_loader(data, order, **options), n_batches):
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == (options["batch_size"], T)
        assert torch.equal(y, x + 1)
        seen += (x[:, 0] // T).tolist()
    return seen


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
def test_shuffled_epochs_are_permutations_and_differ(n: int) -> None:
    order = SampleOrder(n, "shuffled", 5)
    epochs = [tuple(order.window(e * n + i) for i in range(n)) for e in range(8)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    # Eight draws among two or six permutations may repeat; larger ones must not.
    assert len(set(epochs)) == (1 if n == 1 else 8) or n in (2, 3) and len(set(epochs)) > 1
    other = SampleOrder(n, "shuffled", 6)
    again = SampleOrder(n, "shuffled", 5)
    assert [again.window(i) for i in range(8 * n)] == [w for epoch in epochs for w in epoch]
    if n > 3:
        assert tuple(other.window(i) for i in range(n)) not in epochs


def test_shuffled_order_looks_random() -> None:
    n = 1000
    order = SampleOrder(n, "shuffled", 0)
    places = np.array([[order.window(e * n + i) for i in range(n)] for e in range(20)])
    correlation = np.corrcoef(np.arange(n), places[0])[0, 1]
    neighbours = np.mean(np.abs(np.diff(places, axis=1)) == 1)
    # A uniform permutation has correlation 0 +- 0.03, 0.2 % neighbours, window means 499.5 +- 65.
    assert abs(correlation) < 0.15
    assert neighbours < 0.01
    assert np.abs(places.mean(axis=0) - 499.5).max() < 65 * 5


def test_shuffled_order_is_pinned() -> None:
    # Another permutation under the same seed would break the resume of every running job.
    order = SampleOrder(10, "shuffled", 1)
    assert [order.window(i) for i in range(10)] == PINNED


def test_billions_of_windows_need_no_table() -> None:
    n = 5_000_000_000
    order = SampleOrder(n, "shuffled", 1)
    samples = range(3 * n - 500, 3 * n + 500)
    picked = [order.window(s) for s in samples]
    assert all(0 <= w < n for w in picked)
    assert len(set(picked[:500])) == len(set(picked[500:])) == 500
    assert [order.epoch(samples[0]), order.epoch(samples[-1])] == [2, 3]


def test_unknown_order_is_a_user_error() -> None:
    with pytest.raises(UserError, match="'random' is not known; use sequential or shuffled"):
        SampleOrder(3, "random")
    with pytest.raises(ValueError, match="n_windows"):
        SampleOrder(0)


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
@pytest.mark.parametrize("start", [0, 1, 5, 7, 13, 20])
def test_stream_from_any_start_across_epochs(data: PretrainDataset, order: str, start: int) -> None:
    plan = SampleOrder(7, order, 3)
    expected = [plan.window(s) for s in range(start, start + 18)]
    if order == "sequential":
        assert expected == [s % 7 for s in range(start, start + 18)]
    for batch_size in (1, 3, 9):
        options = {"start_sample": start, "batch_size": batch_size}
        assert windows(data, plan, 18 // batch_size, **options) == expected


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_workers_do_not_change_the_stream(data: PretrainDataset, order: str) -> None:
    plan = SampleOrder(7, order, 3)
    options = {"start_sample": 5, "batch_size": 2, "skip_spans": [(8, 11)]}
    alone = windows(data, plan, 9, num_workers=0, **options)
    assert windows(data, plan, 9, num_workers=2, **options) == alone


def test_skip_spans_are_jumped_over(data: PretrainDataset) -> None:
    plan = SampleOrder(7)
    spans = [(9, 12), (2, 4), (11, 15), (3, 4)]
    left = [s for s in range(30) if not (2 <= s < 4 or 9 <= s < 15)]
    assert [next_sample(s, spans) for s in (0, 2, 3, 9, 14, 15)] == [0, 4, 4, 15, 15, 15]
    seen = windows(data, plan, 7, start_sample=0, batch_size=3, skip_spans=spans)
    assert seen == [s % 7 for s in left[:21]]


def test_advance_counts_as_the_stream_does(data: PretrainDataset) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        starts = rng.integers(0, 40, 4)
        spans = [(int(s), int(s + rng.integers(0, 9))) for s in starts]
        position, count = (int(v) for v in rng.integers(0, 20, 2))
        drawn, sample = [], position
        for _ in range(count):
            sample = next_sample(sample, spans)
            drawn.append(sample)
            sample += 1
        assert advance(position, count, spans) == (drawn[-1] + 1 if drawn else position)
    spans = [(3, 6)]
    assert advance(1, 2, spans) == 3
    plan = SampleOrder(7, "shuffled", 1)
    whole = windows(data, plan, 6, start_sample=1, batch_size=2, skip_spans=spans)
    for batches in range(5):
        resumed = {"start_sample": advance(1, 2 * batches, spans), "skip_spans": spans}
        rest = windows(data, plan, 6 - batches, batch_size=2, **resumed)
        assert rest == whole[2 * batches :]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_out_the_same_stream(data: PretrainDataset, world_size: int) -> None:
    # case B22
    plan = SampleOrder(7, "shuffled", 2)
    common = {"start_sample": 3, "skip_spans": [(6, 8)]}
    whole = windows(data, plan, 3, batch_size=2 * world_size, **common)
    ranks = [
        windows(data, plan, 3, batch_size=2, rank=rank, world_size=world_size, **common)
        for rank in range(world_size)
    ]
    assert [w for turn in zip(*ranks, strict=True) for w in turn] == whole


def test_loader_leaves_the_global_rng_alone(data: PretrainDataset) -> None:
    before = torch.get_rng_state()
    for workers in (0, 2):
        windows(data, SampleOrder(7), 2, start_sample=0, batch_size=2, num_workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bad_token_is_one_user_error_at_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    torch.save(torch.arange(7 * T + 1), path)
    data = PretrainDataset(path, T, 100)
    data.vocab_size = 20
    for workers in (0, 1):
        loader = make_loader(
            data, SampleOrder(7), start_sample=0, batch_size=1, num_workers=workers
        )
        # Read ahead or not, the batches before it come first.
        assert [int(next(loader)[0][0, 0]) for _ in range(4)] == [0, 4, 8, 12]
        with pytest.raises(UserError) as caught:
            next(loader)
        # One line, without the traceback that torch sends along from a worker.
        assert str(caught.value).startswith(f"{path}: token 20 has id 20, outside 0..19")
        assert "\n" not in str(caught.value)
        # Nothing waits for a garbage collection: held by the exception, a worker would still live.
        assert multiprocessing.active_children() == []


# Documents, ranks, workers -----------------------------------------------------------------------


def drawn(data: PretrainDataset, order: SampleOrder, n_batches: int, **options: Any) -> list[Any]:
    """Every row of the first batches, all its columns in one list."""
    return [
        torch.cat(row).tolist()
        for batch in itertools.islice(make_loader(data, order, **options), n_batches)
        for row in zip(*batch, strict=True)
    ]


def open_packed(folder: Path) -> PretrainDataset:
    return PretrainDataset(folder, T, 100, document_mode=True, mask_boundary_targets=True)


def run_rank(folder: str, batches: int, start_sample: int, rank: int, world_size: int) -> None:
    """One rank in a process of its own: all it has are the files and where to begin."""
    found = []
    for order, workers in CASES:
        data = open_packed(Path(folder))
        rows = drawn(
            data, SampleOrder(len(data), order, 3), batches, start_sample=start_sample,
            batch_size=GLOBAL_BATCH // world_size, skip_spans=SPANS, num_workers=workers,
            rank=rank, world_size=world_size,
        )  # fmt: skip
        found.append(rows)
    Path(folder).with_name(f"rank{rank}.json").write_text(json.dumps(found))


def run_job(folder: Path, batches: int, start_sample: int, world_size: int) -> list[list[Any]]:
    """For every case the rows of all ranks, in the order of the samples."""
    program = "import sys; from tests.test_loader import run_rank as run; "
    program += "run(sys.argv[1], *map(int, sys.argv[2:]))"
    numbers = [(batches, start_sample, rank, world_size) for rank in range(world_size)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(folder), *map(str, some)], cwd=ROOT)
        for some in numbers
    ]
    assert [rank.wait() for rank in ranks] == [0] * world_size
    found = [json.loads(folder.with_name(f"rank{r}.json").read_text()) for r in range(world_size)]
    return [
        [row for turn in zip(*of_ranks, strict=True) for row in turn]
        for of_ranks in zip(*found, strict=True)
    ]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seventeen windows of 4, with documents."""
    folder = tmp_path_factory.mktemp("data") / "packed"
    lengths = [5, 1, 7, 20, 2, 2, 30, 3]
    ids = np.arange(sum(lengths))
    ids[np.cumsum(lengths) - 1] = 99
    with ShardWriter(
        folder, vocab_size=100, eos_id=99, tokenizer_name="toy",
        tokenizer_fingerprint="ab" * 32, shard_size_tokens=19, source_names=["only"],
    ) as out:  # fmt: skip
        out.append_documents(ids, lengths, [0] * len(lengths))
    return folder


@pytest.fixture(scope="module")
def resumed(packed: Path) -> dict[tuple[str, int], list[Any]]:
    """The rows of the whole run, by case; from job to job only the position goes on."""
    jobs, position = [], 0
    for world_size, batches in JOBS:
        jobs.append(run_job(packed, batches, position, world_size))
        position = advance(position, GLOBAL_BATCH * batches, SPANS)
    return {case: sum(parts, []) for case, *parts in zip(CASES, *jobs, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume_on_other_ranks_and_workers(
    packed: Path, resumed: dict[tuple[str, int], list[Any]], case: tuple[str, int]
) -> None:
    # cases B04, B22
    data, seen = open_packed(packed), resumed[case]
    plan, n = SampleOrder(len(data), case[0], 3), len(data)
    whole = {"start_sample": 0, "batch_size": GLOBAL_BATCH, "skip_spans": SPANS}
    assert seen == drawn(data, plan, sum(batches for _, batches in JOBS), **whole)

    # Each sample exactly once: an epoch, the skipped samples added, is the set of all windows.
    every = sorted(torch.cat(data[w]).tolist() for w in range(n))
    skipped = [torch.cat(data[plan.window(s)]).tolist() for s in range(*SPANS[0])]
    second = 2 * n - len(skipped)
    assert sorted(seen[:n]) == every
    assert sorted(seen[n:second] + skipped) == every
    assert sorted(seen[second : second + n]) == every


def reading_threads() -> int:
    return sum(thread.name.startswith("data") for thread in threading.enumerate())


def test_the_reading_thread_ends_with_its_loader(data: PretrainDataset) -> None:
    before = reading_threads()
    loader = make_loader(data, SampleOrder(7), start_sample=0, batch_size=2)
    next(loader)
    assert reading_threads() == before + 1
    del loader
    assert reading_threads() == before


def test_no_worker_outlives_its_loader(data: PretrainDataset) -> None:
    loader = make_loader(data, SampleOrder(7), start_sample=0, batch_size=2, num_workers=2)
    next(loader)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    del loader
    assert not any(worker.is_alive() for worker in workers)


def test_batches_are_read_ahead_and_no_more(data: PretrainDataset) -> None:
    read: list[int] = []

    class Recorder(WindowDataset):
        n_windows = 1000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            read.append(index)
            return (torch.tensor([index]),)

    loader = make_loader(Recorder(), SampleOrder(1000), start_sample=0, batch_size=1, prefetch=3)
    for drawn_so_far in range(1, 6):
        assert int(next(loader)[0]) == drawn_so_far - 1
        for _ in range(1000):
            if len(read) == drawn_so_far + 3:
                break
            threading.Event().wait(0.01)
        assert read == list(range(drawn_so_far + 3))


def test_batches_own_their_memory(data: PretrainDataset) -> None:
    loader = make_loader(data, SampleOrder(7), start_sample=0, batch_size=2)
    (x, y), (later, _) = next(loader), next(loader)
    x.fill_(-1)
    assert y.min() == 1 and later[0].tolist() == [8, 9, 10, 11] and x.is_contiguous()
