"""How much of each source goes where, and in which order its documents come.

Everything here is arithmetic on token counts in whole numbers: the same counts, weights and seed
give the same plan on every machine.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np

OnExhausted = Literal["stop", "repeat", "continue"]

_MASK = (1 << 64) - 1


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Positive weights (sources,) scaled to sum 1, exactly as the decimals that were written."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def quotas(
    available: Sequence[int],
    weights: Sequence[float],
    budget: int | None,
    on_exhausted: OnExhausted,
) -> list[int]:
    """Tokens to take of each source (sources,).

    Args:
        available: the tokens that each source has.
        budget: the tokens wanted of all together; None: as many as there are.
        on_exhausted: "stop" keeps the weights and ends when the first source has run out;
            "continue" lets the others share what a source lacks, by their weights; "repeat" keeps
            the weights and begins a short source again (without a budget: until every source was
            used once).
    """
    parts = shares(weights)
    most = [Fraction(tokens) / part for tokens, part in zip(available, parts, strict=True)]
    if on_exhausted == "continue":
        return _filled(available, parts, sum(available) if budget is None else budget)
    total: Fraction = min(most) if on_exhausted == "stop" else max(most)
    if budget is not None:
        # Nothing can be repeated of a source that has nothing.
        keeps = on_exhausted == "repeat" and all(available)
        total = Fraction(budget) if keeps else min(min(most), Fraction(budget))
    return [int(part * total) for part in parts]


def _filled(available: Sequence[int], parts: Sequence[Fraction], budget: int) -> list[int]:
    """`budget` dealt out by weights; what a source lacks goes to those that have more."""
    taken = [0] * len(available)
    open_sources = set(range(len(available)))
    left = min(budget, sum(available))
    while open_sources:
        weight = sum(parts[i] for i in open_sources)
        short = {i for i in open_sources if available[i] <= parts[i] / weight * left}
        if not short:
            for i in open_sources:
                taken[i] = int(parts[i] / weight * left)
            break
        for i in short:
            taken[i] = available[i]
            left -= available[i]
        open_sources -= short
    return taken


def split_quotas(
    train: Sequence[int],
    val: Sequence[int],
    weights: Sequence[float],
    *,
    max_tokens: int,
    val_fraction: float,
    on_exhausted: OnExhausted,
) -> tuple[list[int], list[int]]:
    """(training, validation) tokens to take of each source, from the tokens (sources,) of each.

    `max_tokens` (0: no limit) bounds both together; validation gets `val_fraction` of it. Documents
    are not repeated in validation. Where keeping the weights would leave it less than half of its
    fraction, because a source of few long documents has hardly any there, the others fill up.
    """
    val_budget = val_budget_of(max_tokens, val_fraction)
    policy = "stop" if on_exhausted == "repeat" else on_exhausted
    val_taken = quotas(val, weights, val_budget, policy) if val_fraction else [0] * len(val)
    train_budget = max_tokens - sum(val_taken) if max_tokens else None
    train_taken = quotas(train, weights, train_budget, on_exhausted)
    due = int((sum(train_taken) + sum(val_taken)) * Fraction(repr(val_fraction)))
    if 2 * sum(val_taken) < due:
        val_taken = quotas(val, weights, due, "continue")
        train_budget = max_tokens - sum(val_taken) if max_tokens else None
        train_taken = quotas(train, weights, train_budget, on_exhausted)
    return train_taken, val_taken


def tokens_needed(
    available: Sequence[int],
    exhausted: Sequence[bool],
    weights: Sequence[float],
    budget: int,
    on_exhausted: OnExhausted,
) -> list[int]:
    """Tokens of each source (sources,) that are enough for `budget` tokens of all together.

    `available` is what has been read so far, `exhausted` tells which sources have no more.
    """
    parts = shares(weights)
    if on_exhausted != "continue":
        return [math.ceil(part * budget) for part in parts]
    most = [have if ended else budget for have, ended in zip(available, exhausted, strict=True)]
    # Rounded down there, so one more.
    return [tokens + 1 for tokens in _filled(most, parts, budget)]


def val_budget_of(max_tokens: int, val_fraction: float) -> int | None:
    """The part of a token budget that validation gets; None without a budget."""
    return int(max_tokens * Fraction(repr(val_fraction))) if max_tokens else None


def validation_mask(
    keys: np.ndarray[Any, Any], *, seed: int, val_fraction: float
) -> np.ndarray[Any, Any]:
    """Which documents (n,) go to validation, by their 64-bit keys and the seed alone."""
    limit = int(Fraction(repr(val_fraction)) * 2**64)
    return _mixed(keys ^ _mixed(np.array([seed & _MASK], np.uint64))) < np.uint64(limit)


def _mixed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A bijection of 64-bit numbers that spreads close ones (the finaliser of SplitMix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Taken(NamedTuple):
    """One document of the mixture: its source, and its ids with the EOS."""

    source: int
    ids: np.ndarray[Any, Any]


def interleave(
    streams: Sequence[Iterator[np.ndarray[Any, Any]]], wanted: Sequence[int]
) -> Iterator[Taken]:
    """Documents of all sources, the next always from the one that is furthest behind its share.

    Args:
        streams: for each source its documents (tokens,) with their EOS, at least `wanted` tokens.
        wanted: tokens to take of each source. The document that reaches it is cut, and keeps its
            EOS; one token is left over where a document and its EOS find no room.
    """
    total, taken, written = sum(wanted), [0] * len(wanted), 0
    active = [i for i, tokens in enumerate(wanted) if tokens > 1]
    while active:
        source = max(active, key=lambda i: wanted[i] * written - taken[i] * total)
        room = wanted[source] - taken[source]
        ids = next(streams[source])
        if len(ids) > room:
            ids = np.concatenate([ids[: room - 1], ids[-1:]])
        yield Taken(source, ids)
        taken[source] += len(ids)
        written += len(ids)
        if wanted[source] - taken[source] < 2:
            active.remove(source)
