"""A sample of the soak (tests/soak.py): memory and files; speed is for the whole one."""

from pathlib import Path

import pytest

from tests import soak


def test_memory_and_files_do_not_grow(tmp_path: Path) -> None:
    numbers, wrong = soak.judged(soak.live(tmp_path, 480, 2))
    assert numbers["memory_growth"] <= soak.MEMORY_SHARE
    assert numbers["files_most"] == numbers["files_least"] >= 9
    assert not [w for w in wrong if "speed" not in w]


@pytest.mark.campaign
def test_campaign_20_000_optimizer_steps(tmp_path: Path) -> None:
    assert soak.judged(soak.live(tmp_path, 20_000, 4))[1] == []


def test_a_leak_and_a_slow_end_are_called_wrong() -> None:
    def life(resident: float, files: int, cpu_per_step: float) -> list[dict[str, float]]:
        return [
            {"opt_step": i, "resident_mib": 100 + resident * i, "files": 9 + files * i,
             "cpu_sec": cpu_per_step * i}
            for i in range(20)
        ]  # fmt: skip

    steady = life(0, 0, 1.0)
    assert soak.judged([steady, steady])[1] == []
    assert "memory grows" in soak.judged([steady, life(0.5, 0, 1.0)])[1][0]
    assert "number of files" in soak.judged([steady, life(0, 1, 1.0)])[1][0]
    assert "speed changes by -9.1%" in soak.judged([steady, life(0, 0, 1.1)])[1][0]
