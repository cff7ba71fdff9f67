import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest

from mamba3_lite.data.dedup import NearDuplicates, exact_key, near_signature
from mamba3_lite.errors import UserError


def words(seed: int, n: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [f"word{rng.randrange(5000)}" for _ in range(n)]


def edited(base: list[str], n: int, seed: int = 1) -> str:
    """The text with `n` words, far apart, replaced."""
    changed = list(base)
    for place in range(n):
        changed[place * len(base) // n] = f"new{seed}x{place}"
    return " ".join(changed)


def test_exact_key_is_the_start_of_sha256() -> None:
    assert exact_key("é\n") == hashlib.sha256("é\n".encode()).digest()[:16]
    assert exact_key("a") != exact_key("a ")


def test_signature_is_the_same_in_every_process() -> None:
    pytest.importorskip("datasketch")
    text = "One and the same text, whatever the order of a set of strings may be today."
    script = (
        "import sys; from mamba3_lite.data.dedup import near_signature; "
        "sys.stdout.write(near_signature(sys.argv[1]).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, text],
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert bytes.fromhex(done.stdout) == near_signature(text)
    assert len(near_signature(text)) == 512


def test_signatures_estimate_the_similarity() -> None:
    pytest.importorskip("datasketch")
    base = words(0)
    first = np.frombuffer(near_signature(" ".join(base)), "<u4")
    for n in (4, 10, 40):
        other = np.frombuffer(near_signature(edited(base, n)), "<u4")
        # A changed word spoils the 5 runs it is in, on both sides.
        runs = len(base) - 4
        truth = (runs - 5 * n) / (runs + 5 * n)
        assert np.mean(first == other) == pytest.approx(truth, abs=0.12)


def test_near_duplicates_are_found_and_others_kept() -> None:
    pytest.importorskip("datasketch")
    known = NearDuplicates(0.7)
    base = words(0)
    assert not known.is_duplicate(" ".join(base))
    assert known.is_duplicate(" ".join(base))
    assert known.is_duplicate(" ".join(base).upper().replace(" ", ", "))
    assert known.is_duplicate(edited(base, 3))
    assert not known.is_duplicate(edited(base, 60))
    assert not any(known.is_duplicate(" ".join(words(seed))) for seed in range(1, 20))
    assert len(known) == 21


@pytest.mark.parametrize("text", ["", "one", "one two", "...", "漢字 かな"])
def test_texts_shorter_than_a_run(text: str) -> None:
    pytest.importorskip("datasketch")
    known = NearDuplicates(0.8)
    assert [known.is_duplicate(text), known.is_duplicate(text)] == [False, True]
    assert not known.is_duplicate("something else")


def test_a_restored_index_answers_as_the_uninterrupted_one() -> None:
    pytest.importorskip("datasketch")
    bases = [words(seed, 60) for seed in range(25)]
    rng = random.Random(5)
    texts = [edited(rng.choice(bases), rng.randrange(1, 8), seed) for seed in range(150)]
    signatures = [near_signature(text) for text in texts]
    whole = NearDuplicates(0.6)
    answers = [whole.is_duplicate_signature(signature) for signature in signatures]
    assert 20 < sum(answers) < 130
    kept: list[np.ndarray] = []
    for signature, answer in zip(signatures, answers, strict=True):
        values = np.frombuffer(signature, "<u4")
        # Bands may overlook a similar document, but never name one that is not similar.
        assert not answer or max(np.mean(values == other) for other in kept) >= 0.6
        kept += [] if answer else [values]
    for stop in (0, 1, 60, 149, 150):
        stored = [s for s, bad in zip(signatures[:stop], answers, strict=False) if not bad]
        resumed = NearDuplicates(0.6)
        resumed.restore(stored)
        rest = [resumed.is_duplicate_signature(signature) for signature in signatures[stop:]]
        assert rest == answers[stop:]
        assert len(resumed) == len(whole)


@pytest.mark.parametrize("threshold", [0.0, 0.99, 1.0, float("nan")])
def test_a_threshold_that_bands_cannot_serve_is_refused(threshold: float) -> None:
    with pytest.raises(UserError, match="near_threshold must be between 0.1 and 0.95"):
        NearDuplicates(threshold)


@pytest.mark.parametrize("threshold", [0.1, 0.95])
def test_the_ends_of_the_range_work(threshold: float) -> None:
    pytest.importorskip("datasketch")
    known = NearDuplicates(threshold)
    assert not known.is_duplicate("a b c d e f g")
    assert known.is_duplicate("a b c d e f g")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mamba3_lite.data import dedup

    dedup._empty_sketch.cache_clear()
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UserError, match=r'`datasketch`.*pip install "mamba3-lite\[dedup\]"'):
        NearDuplicates(0.8)
