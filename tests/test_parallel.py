"""Several ranks train as one process does: DDP and FSDP2 over gloo, on this machine's cores."""

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from mamba3_lite.utils.logging import read_metrics
from tests import ranks, runs

SIZES = (1, 2, 4)
MODES = ("ddp", "fsdp")
# The same 8 sequences an optimizer step for every number of ranks.
GEOMETRY = {
    1: {"batch_size": 4, "gradient_accumulation_steps": 2},
    2: {"batch_size": 2, "gradient_accumulation_steps": 2},
    4: {"batch_size": 1, "gradient_accumulation_steps": 2},
}  # fmt: skip
# So that the matrix of who goes on with what holds both.
FORMATS = {"ddp": "files", "fsdp": "sharded"}
LONG = {"max_steps": 20, "save_every": 100}
STOP_AT, VAL_WINDOWS = 15, 13

Job = tuple[str, dict[str, Any]]


def run(n: int, folder: Path, jobs: Iterable[Job], *, local_size: int | None = None) -> None:
    """All jobs in one group of ranks, since starting it takes longer than they do."""
    arguments = ["-m", "tests.rank_jobs", str(folder), json.dumps(list(jobs))]
    for done in ranks.finish(ranks.start(n, arguments, local_size=local_size)):
        assert done.returncode == 0, done.stdout + done.stderr


def said(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each rank found."""
    paths = sorted((folder / name).glob("rank_*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def rows(folder: Path, name: str, kind: str = "train") -> list[dict[str, Any]]:
    return [r for r in read_metrics(folder / name / "run" / "metrics.jsonl") if r["kind"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run of this file: whole ones, stopped ones, broken ones; then all that go on."""
    where = tmp_path_factory.mktemp("parallel")
    runs.write_tokens(where / "train.bin", 24 * 101 + 1)
    runs.write_tokens(where / "val.bin", 24 * VAL_WINDOWS + 1, seed=1)
    validation = {"val_data_path": str(where / "val.bin"), "eval_interval": 10}
    for n in SIZES:
        jobs: list[Job] = []
        for mode in (*MODES, *(["hsdp"] if n == 4 else [])):
            shared = {**GEOMETRY[n], "parallel_mode": mode, "shard_ranks": 2 if n == 4 else 0}
            jobs.append((f"whole-{mode}-{n}", {**shared, **LONG, **validation}))
            if mode == "hsdp":
                continue
            told = {"checkpoint_format": FORMATS[mode], "_": {"signal_at": STOP_AT}}
            jobs.append((f"stopped-{mode}-{n}", {**shared, **told}))
            for kind, told in (
                ("loss", {"nan_loss_at": 5}), ("gradient", {"nan_gradient_at": [5]}),
                ("always", {"nan_gradient_at": list(range(12, 30))}),
            ):  # fmt: skip
                changes = {"nan_guard_max_consecutive": 3, "max_rollbacks": 1, "_": told}
                jobs.append((f"nan-{kind}-{mode}-{n}", {**shared, **changes}))
        run(n, where, jobs)
    for n in SIZES:
        jobs = []
        for saved, size, mode in itertools.product(MODES, SIZES, MODES):
            name = f"resumed-{saved}-{size}-{mode}-{n}"
            shutil.copytree(where / f"stopped-{saved}-{size}" / "run", where / name / "run")
            jobs.append((name, {**GEOMETRY[n], "parallel_mode": mode}))
        run(n, where, jobs)
    return where


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return runs.final_weights(folder / name / "run")


def furthest(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


BOTH = list(itertools.product(MODES, SIZES))
ALL = [*BOTH, ("hsdp", 4)]


@pytest.mark.parametrize("mode, n", ALL)
def test_ranks_train_as_one_process_does(folder: Path, mode: str, n: int) -> None:
    # cases B01, B03, B17, B18
    want, got = rows(folder, "whole-ddp-1"), rows(folder, f"whole-{mode}-{n}")
    assert [r["opt_step"] for r in got] == [r["opt_step"] for r in want] and len(want) == 40
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["lr"] == other["lr"]
        assert one["tokens_seen"] == other["tokens_seen"]
        assert (one["grad_norm"] is None) == (other["opt_step"] == 0)
        if one["grad_norm"] is not None:
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6)
    assert furthest(weights(folder, f"whole-{mode}-{n}"), weights(folder, "whole-ddp-1")) < 1e-5
    assert want[-1]["loss"] < want[0]["loss"] - 0.2


@pytest.mark.parametrize("mode, n", ALL)
def test_every_rank_ends_with_the_same_tied_weights(folder: Path, mode: str, n: int) -> None:
    found = said(folder, f"whole-{mode}-{n}")
    assert len(found) == n and all(one["tied"] for one in found)
    assert len({one["weights"] for one in found}) == 1
    assert len({json.dumps(one["state"]) for one in found}) == 1


@pytest.mark.parametrize("mode, n", ALL)
def test_every_sequence_is_seen_by_one_rank_once_b22(folder: Path, mode: str, n: int) -> None:
    # case B22: 160 of 20 optimizer steps, more than the 101 windows of an epoch
    alone = said(folder, "whole-ddp-1")[0]["seen"]
    together = [sequence for one in said(folder, f"whole-{mode}-{n}") for sequence in one["seen"]]
    assert len(alone) == 160 and sorted(together) == sorted(alone)
    assert len(set(alone[:101])) == 101


@pytest.mark.parametrize("mode, n", ALL)
def test_uneven_validation_has_the_value_of_one_process(folder: Path, mode: str, n: int) -> None:
    want = rows(folder, "whole-ddp-1", "val")
    got = rows(folder, f"whole-{mode}-{n}", "val")
    assert [r["val_tokens"] for r in got] == [24 * VAL_WINDOWS] * 2
    for one, other in zip(got, want, strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], abs=1e-5)


@pytest.mark.parametrize("mode, n", BOTH)
def test_a_signal_to_one_rank_stops_and_saves_all(folder: Path, mode: str, n: int) -> None:
    assert [one["code"] for one in said(folder, f"stopped-{mode}-{n}")] == [143] * n
    # Inside the window that micro-step 15 opened: the boundary before it is what was saved.
    run = folder / f"stopped-{mode}-{n}" / "run"
    assert (run / "meta_step_7.json").is_file()
    parts = [path.name for path in run.glob("shards_step_7/__*")]
    assert len(parts) == (n if mode == "fsdp" else 0)


@pytest.mark.parametrize("saved, size, mode, n", [(*a, *b) for a in BOTH for b in BOTH])
def test_any_ranks_go_on_with_what_any_others_saved(
    folder: Path, saved: str, size: int, mode: str, n: int
) -> None:
    name = f"resumed-{saved}-{size}-{mode}-{n}"
    want = {r["micro_step"]: r["loss"] for r in rows(folder, "resumed-ddp-1-ddp-1")}
    got = {r["micro_step"]: r["loss"] for r in rows(folder, name)}
    assert sorted(got) == sorted(want) == list(range(1, 25))
    assert max(abs(got[m] - want[m]) for m in want) < 1e-5
    assert furthest(weights(folder, name), weights(folder, "resumed-ddp-1-ddp-1")) < 1e-5
    # What was seen before the stop and after it is what a run that was never stopped sees.
    before = [s for one in said(folder, f"stopped-{saved}-{size}") for s in one["seen"]]
    after = [s for one in said(folder, name) for s in one["seen"]]
    whole = said(folder, "whole-ddp-1")[0]["seen"][:96]
    # The open window is replayed: a part of it has been seen twice, and counted once.
    assert sorted(after) == sorted(whole[56:]) and set(before) <= set(whole[:60])


@pytest.mark.parametrize(
    "kind, mode", [(kind, mode) for kind in ("loss", "gradient") for mode in MODES]
)
def test_what_is_not_finite_on_one_rank_drops_the_window_on_all_b11(
    folder: Path, kind: str, mode: str
) -> None:
    # case B11; micro-step 5 is in the third window
    reference = weights(folder, "nan-loss-ddp-1")
    for n in SIZES:
        name = f"nan-{kind}-{mode}-{n}"
        found = said(folder, name)
        assert [one["state"]["dropped_windows"] for one in found] == [1] * n
        assert len({one["weights"] for one in found}) == 1
        assert furthest(weights(folder, name), reference) < 1e-5
        assert all(torch.isfinite(w).all() for w in weights(folder, name).values())


@pytest.mark.parametrize("mode, n", BOTH)
def test_what_is_never_finite_rolls_all_back_and_is_given_up_by_all(
    folder: Path, mode: str, n: int
) -> None:
    found = said(folder, f"nan-always-{mode}-{n}")
    assert len(found) == n
    assert all("after 1 rollbacks: giving up" in one["error"] for one in found)
    events = [row["event"] for row in rows(folder, f"nan-always-{mode}-{n}", "event")]
    assert events.count("rollback") == 1
