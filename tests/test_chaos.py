"""A sample of the fault campaign (tests/chaos.py); the campaign itself is `make chaos`."""

from pathlib import Path

import pytest

from tests import chaos

SAMPLE = ("SIGKILL of one rank", "disk full in a save")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return chaos.undisturbed(tmp_path_factory.mktemp("chaos") / "quiet")


@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_is_lost_and_nothing_silently_wrong(
    name: str, quiet: dict[str, Path], tmp_path: Path
) -> None:
    assert chaos.experiment(name, 100, quiet, tmp_path / "room") is None


@pytest.mark.campaign
@pytest.mark.parametrize("name", chaos.FAULTS)
@pytest.mark.parametrize("seed", range(20))
def test_campaign(name: str, seed: int, quiet: dict[str, Path], tmp_path: Path) -> None:
    assert chaos.experiment(name, seed, quiet, tmp_path / "room") is None


def test_a_run_that_lost_something_is_called_wrong(quiet: dict[str, Path], tmp_path: Path) -> None:
    """The campaign can fail: held to a run of another length it does."""
    other = chaos.Room(tmp_path / "other", chaos.random.Random(0), {})
    chaos.furnish(other.folder)
    other.go_on({**chaos.SETTINGS, "parallel_mode": "ddp", "max_steps": 21})
    wrong = dict.fromkeys(chaos.MODES, other.run)
    problem = chaos.experiment("SIGKILL of all ranks", 0, wrong, tmp_path / "room")
    assert problem is not None and "not 21" in problem
