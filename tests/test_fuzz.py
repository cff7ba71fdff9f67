"""A sample of the fuzzing (tests/fuzz.py)."""

from pathlib import Path

import pytest

from mamba3_lite.errors import UserError
from tests import fuzz


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    counts, wrong = fuzz.campaign(240, 0, tmp_path)
    assert wrong == []
    # It does damage, and not only beyond repair.
    assert all(found["refused"] + found["loaded"] >= 20 for found in counts.values())
    assert counts["configurations"]["refused"] > 50 and counts["shards"]["refused"] > 20


@pytest.mark.campaign
def test_campaign_2_000_mutations(tmp_path: Path) -> None:
    assert fuzz.campaign(2000, 0, tmp_path)[1] == []


def test_a_crash_and_a_wrong_content_are_called_wrong() -> None:
    def crash() -> None:
        raise KeyError("sha256")

    def refuse() -> None:
        raise UserError("mend it")

    assert fuzz.judge(crash) == ("crashed", "KeyError: 'sha256'")
    assert fuzz.judge(lambda: "other tokens were read") == ("loaded", "other tokens were read")
    assert fuzz.judge(refuse) == ("refused", None)
