import random
import string
from typing import Any

import pytest

from mamba3_lite.data.clean import CleanConfig, reason_to_drop
from mamba3_lite.errors import UserError

PROSE = "The quick brown fox jumps over the lazy dog, and then it sleeps for an hour. "


def reason(text: str, **settings: Any) -> str | None:
    return reason_to_drop(text, CleanConfig(**settings))


@pytest.mark.parametrize("text", ["a", "ok", "x y", PROSE, PROSE * 5000, "Fünf große Äpfel. " * 20])
def test_language_of_any_length_is_kept(text: str) -> None:
    assert reason(text) is None


def test_code_is_kept() -> None:
    code = 'def f(x: int) -> list[int]:\n    return [i**2 for i in range(x)]  # "squares"\n' * 40
    assert reason(code) is None


@pytest.mark.parametrize("text", ["", " ", "\n\t \u3000\n"])
def test_nothing_but_white_space_is_empty(text: str) -> None:
    assert reason(text) == "empty"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab" * 400, "too_few_unique"),
        (PROSE + "=" * 5000, "too_few_unique"),
        ("20241017 31415926535897 a table" * 3, "digits"),
        ("١٢٣٤٥٦٧٨٩٠ تا", "digits"),
        ("!?&%$(){};:,.-+abcdef", "punctuation"),
        ("«»…—“”€→ abc", "punctuation"),
        ("a  b \n c \t d\u3000\u3000 ", "whitespace"),
    ],
)
def test_each_rule_drops(text: str, expected: str) -> None:
    assert reason(text) == expected
    assert reason(text, enabled=False) is None


@pytest.mark.parametrize(
    ("setting", "char", "expected"),
    [
        ("max_digits", "7", "digits"),
        ("max_punctuation", ";", "punctuation"),
        ("max_whitespace", " ", "whitespace"),
        ("max_digits", "٧", "digits"),
        ("max_punctuation", "—", "punctuation"),
        ("max_whitespace", "\u2003", "whitespace"),
    ],
)
def test_a_share_is_dropped_only_above_its_limit(setting: str, char: str, expected: str) -> None:
    letters = string.ascii_letters[:30]
    assert reason(letters + char * 10, **{setting: 0.25}) is None
    assert reason(letters + char * 11, **{setting: 0.25}) == expected
    assert reason(letters + char * 11, **{setting: 0.3}) is None


def test_unique_share_of_a_short_text_is_the_plain_one() -> None:
    assert reason("a" * 20) is None
    assert reason("a" * 21) == "too_few_unique"
    assert reason("a" * 256 + "b" * 256, min_unique_chars=2 / 512) is None
    assert reason("a" * 256 + "b" * 256, min_unique_chars=2.1 / 512) == "too_few_unique"


def test_the_counts_equal_a_plain_loop() -> None:
    rng = random.Random(0)
    alphabet = string.printable + "äß٣四—€\u2003😀"
    limits = {"max_digits": 0.2, "max_punctuation": 0.3, "max_whitespace": 0.1}
    seen = set()
    for _ in range(300):
        letters = rng.choices(alphabet, k=rng.randrange(1, 40))
        text = "".join(letters) + "abcdefgh"[: rng.randrange(9)]
        shares = {
            "digits": sum(c.isdecimal() for c in text),
            "punctuation": sum(c in string.punctuation or c in "—€😀" for c in text),
            "whitespace": sum(c.isspace() for c in text),
        }
        expected = next(
            (name for name, n in shares.items() if n > limits[f"max_{name}"] * len(text)), None
        )
        if not text.strip():
            expected = "empty"
        assert reason(text, min_unique_chars=0.0, **limits) == expected, repr(text)
        seen.add(expected)
    assert {None, "digits", "punctuation", "whitespace"} <= seen


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_threshold_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(UserError, match=r"clean\.max_digits must be between 0 and 1, not"):
        CleanConfig(max_digits=value)
