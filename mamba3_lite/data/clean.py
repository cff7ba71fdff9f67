"""Rules that drop documents which are hardly language: long runs, tables of digits, blank pages."""

import dataclasses
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mamba3_lite.errors import UserError

# The share of unique characters of a whole text falls with its length, and would drop every long
# document: English has some 30 different characters in a window of this size, whatever follows.
_WINDOW_CHARS = 256
_ASCII = bytes(range(128))


@dataclass(frozen=True)
class CleanConfig:
    """Thresholds, all shares of a text's characters, 0 to 1.

    `min_unique_chars` is taken over windows of 256 characters: different characters in each, summed
    and divided by the length. `UserError`: a threshold outside 0..1.
    """

    enabled: bool = True
    min_unique_chars: float = 0.05
    max_digits: float = 0.5
    max_punctuation: float = 0.5
    max_whitespace: float = 0.5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise UserError(f"clean.{field.name} must be between 0 and 1, not {value}")


def reason_to_drop(text: str, config: CleanConfig) -> str | None:
    """Why the text is dropped, or None.

    The first that holds of "empty" (nothing but white space), "too_few_unique", "digits" (decimal
    ones of any script), "punctuation" (with symbols) and "whitespace".
    """
    if not config.enabled:
        return None
    if not text.strip():
        return "empty"
    n_chars = len(text)
    if _has_too_few_unique(text, config.min_unique_chars * n_chars):
        return "too_few_unique"
    limits = {
        "digits": config.max_digits,
        "punctuation": config.max_punctuation,
        "whitespace": config.max_whitespace,
    }
    # Surrogates pass: what they become is for the source, and here they only count as characters.
    raw = text.encode("utf-8", "surrogatepass")
    letters = len(raw) - len(raw.translate(None, _ASCII_LETTERS))
    if n_chars - letters <= min(limits.values()) * n_chars:
        return None  # the common case: what is no letter cannot pass any limit
    others: Counter[str] = Counter()
    if len(raw) > n_chars:
        others.update(raw.translate(None, _ASCII).decode("utf-8", "surrogatepass"))
    for reason, ascii_members, is_member in (
        ("digits", _ASCII_DIGITS, str.isdecimal),
        ("punctuation", _ASCII_PUNCTUATION, _is_punctuation),
        ("whitespace", _ASCII_WHITESPACE, str.isspace),
    ):
        found = len(raw) - len(raw.translate(None, ascii_members))
        found += sum(n for char, n in others.items() if is_member(char))
        if found > limits[reason] * n_chars:
            return reason
    return None


def _has_too_few_unique(text: str, needed: float) -> bool:
    found = 0
    for start in range(0, len(text), _WINDOW_CHARS):
        found += len(set(text[start : start + _WINDOW_CHARS]))
        # The sum only grows, so most texts are read to a third.
        if found >= needed:
            return False
    return found < needed


def _is_punctuation(char: str) -> bool:
    return unicodedata.category(char)[0] in "PS"


def _ascii_members(is_member: Callable[[str], bool]) -> bytes:
    return bytes(code for code in _ASCII if is_member(chr(code)))


_ASCII_LETTERS = _ascii_members(str.isalpha)
_ASCII_DIGITS = _ascii_members(str.isdecimal)
_ASCII_PUNCTUATION = _ascii_members(_is_punctuation)
_ASCII_WHITESPACE = _ascii_members(str.isspace)
