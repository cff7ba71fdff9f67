import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mamba3_lite.data.mixture import (
    interleave,
    quotas,
    shares,
    split_quotas,
    tokens_needed,
    validation_mask,
)

EOS = 9


def documents(lengths: list[int], source: int) -> Iterator[np.ndarray]:
    """Documents of `lengths` tokens with their EOS; the ids tell the source."""
    for length in lengths:
        yield np.array([source] * (length - 1) + [EOS], np.uint16)


@pytest.mark.parametrize(
    ("available", "budget", "policy", "expected"),
    [
        ([500, 200, 200, 100], None, "stop", [500, 200, 200, 100]),
        ([900, 200, 200, 100], None, "stop", [500, 200, 200, 100]),
        ([900, 100, 200, 100], None, "stop", [250, 100, 100, 50]),
        ([900, 900, 900, 900], 100, "stop", [50, 20, 20, 10]),
        ([900, 10, 900, 900], 1000, "stop", [25, 10, 10, 5]),
        ([900, 10, 900, 900], None, "continue", [900, 10, 900, 900]),
        ([900, 10, 900, 900], 100, "continue", [56, 10, 22, 11]),
        ([900, 10, 0, 5], 100, "continue", [85, 10, 0, 5]),
        ([10, 10, 10, 10], 100, "continue", [10, 10, 10, 10]),
        ([900, 10, 900, 900], 100, "repeat", [50, 20, 20, 10]),
        ([500, 10, 20, 100], None, "repeat", [500, 200, 200, 100]),
        ([500, 0, 20, 100], 100, "repeat", [0, 0, 0, 0]),
    ],
)
def test_quotas(available: list[int], budget: Any, policy: Any, expected: list[int]) -> None:
    # case C09
    assert quotas(available, [0.5, 0.2, 0.2, 0.1], budget, policy) == expected


@pytest.mark.parametrize("seed", range(5))
def test_the_binding_source_is_used_to_the_last_token(seed: int) -> None:
    """Floating point would lose a token here and there, and cut a document for it."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        weights = rng.random(4).round(3) + 0.001
        available = rng.integers(1, 10**9, size=4).tolist()
        taken = quotas(available, weights.tolist(), None, "stop")
        assert any(a == b for a, b in zip(taken, available, strict=True))
        assert all(a <= b for a, b in zip(taken, available, strict=True))


def test_shares_are_exact() -> None:
    assert sum(shares([0.1, 0.2, 0.7])) == 1
    assert shares([1, 3]) == shares([0.25, 0.75])


def test_split_quotas_share_the_budget_by_the_same_weights() -> None:
    train, val = split_quotas(
        [900, 900], [90, 90], [3, 1], max_tokens=800, val_fraction=0.05, on_exhausted="stop"
    )
    assert (train, val) == ([570, 190], [30, 10])
    # A source that lacks validation documents bounds validation, and training gets the rest.
    train, val = split_quotas(
        [900, 900], [90, 5], [3, 1], max_tokens=800, val_fraction=0.05, on_exhausted="repeat"
    )
    assert (train, val) == ([585, 195], [15, 5])
    train, val = split_quotas(
        [90, 30], [9, 3], [3, 1], max_tokens=0, val_fraction=0.0, on_exhausted="stop"
    )
    assert (train, val) == ([90, 30], [0, 0])


def test_enough_is_enough_for_the_quotas() -> None:
    weights = [0.5, 0.3, 0.2]
    assert tokens_needed([0, 0, 0], [False] * 3, weights, 100, "stop") == [50, 30, 20]
    needed = tokens_needed([0, 7, 0], [False, True, False], weights, 100, "continue")
    assert quotas([needed[0], 7, needed[2]], weights, 100, "continue") == quotas(
        [10**9, 7, 10**9], weights, 100, "continue"
    )


def test_documents_of_every_source_come_in_proportion_all_along() -> None:
    # case C09
    rng = np.random.default_rng(0)
    weights = [0.7, 0.2, 0.1]
    lengths = [rng.integers(2, 200, size=6000).tolist() for _ in weights]
    available = [sum(some) for some in lengths]
    wanted = quotas(available, weights, 300_000, "stop")
    streams = [documents(some, i) for i, some in enumerate(lengths)]
    counts: Counter[int] = Counter()
    for number, (source, ids) in enumerate(interleave(streams, wanted), start=1):
        counts[source] += len(ids)
        assert (ids[:-1] == source).all() and ids[-1] == EOS
        if number > 500:
            for i, weight in enumerate(weights):
                assert abs(counts[i] / counts.total() - weight) < 0.015
    assert [counts[i] for i in range(3)] == wanted


def test_only_the_last_document_of_a_quota_is_cut() -> None:
    lengths = [[5, 5, 5], [4, 4, 4]]
    taken = list(interleave([documents(some, i) for i, some in enumerate(lengths)], [12, 8]))
    by_source: dict[int, list[int]] = {0: [], 1: []}
    for source, ids in taken:
        by_source[source].append(len(ids))
        assert ids[-1] == EOS
    assert by_source == {0: [5, 5, 2], 1: [4, 4]}


def test_one_token_is_left_where_a_document_and_its_eos_find_no_room() -> None:
    taken = list(interleave([documents([5, 5], 0)], [6]))
    assert [len(ids) for _, ids in taken] == [5]
    assert list(interleave([documents([5], 0)], [1])) == []


def test_repeated_streams_go_round() -> None:
    streams = [documents([3] * 20, 0), itertools.cycle(documents([2, 4], 1))]
    taken = list(interleave(streams, [60, 60]))
    assert [len(ids) for source, ids in taken if source == 1] == [2, 4] * 10


def test_validation_is_chosen_by_key_and_seed() -> None:
    keys = np.random.default_rng(0).integers(2**64, size=100_000, dtype=np.uint64)
    first = validation_mask(keys, seed=0, val_fraction=0.1)
    assert abs(first.mean() - 0.1) < 0.005
    assert (validation_mask(keys[::-1], seed=0, val_fraction=0.1) == first[::-1]).all()
    other = validation_mask(keys, seed=1, val_fraction=0.1)
    assert abs((first & other).mean() - 0.01) < 0.002
    # A larger fraction keeps what is there.
    assert validation_mask(keys, seed=0, val_fraction=0.2)[first].all()
    assert not validation_mask(keys, seed=0, val_fraction=0.0).any()


def test_a_source_of_few_long_documents_does_not_empty_validation() -> None:
    train, val = split_quotas(
        [5000, 5000], [3, 100], [1, 1], max_tokens=0, val_fraction=0.02, on_exhausted="stop"
    )
    assert train == [5000, 5000] and val == [3, 100]
    train, val = split_quotas(
        [5000, 5000], [60, 100], [1, 1], max_tokens=0, val_fraction=0.02, on_exhausted="stop"
    )
    assert val == [60, 60], "where there is enough, the weights are kept"
