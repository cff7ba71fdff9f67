"""pretrain --profile: a trace and a table beside a run that does not notice."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mamba3_lite.cli import main
from mamba3_lite.errors import UserError
from mamba3_lite.training import pretrain
from mamba3_lite.training.profile import MICRO_STEPS, OPERATORS, TRACE
from tests.runs import MODEL, Pretrainer, assert_same_weights, config, final_weights, losses


def trace_names(run: Path) -> list[str]:
    with gzip.open(run / "profile" / TRACE) as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_a_profiled_run_is_the_same_run_and_goes_on(tmp_path: Path, accumulation: int) -> None:
    """It holds four micro-steps and the update behind the last of them."""
    how: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 8}
    for name, profile in (("plain", False), ("profiled", True)):
        (tmp_path / name).mkdir()
        assert Pretrainer(config(tmp_path / name, **how), profile=profile).train() == 0
    runs = [tmp_path / name / "run" for name in ("plain", "profiled")]
    assert losses(runs[0]) == losses(runs[1]) and len(losses(runs[1])) == 8 * accumulation
    assert_same_weights(final_weights(runs[1]), final_weights(runs[0]))
    assert not (runs[0] / "profile").exists()
    names = trace_names(runs[1])
    assert names.count("micro_step") == MICRO_STEPS
    updates = [name for name in names if name.startswith("Optimizer.step")]
    assert len(updates) == max(1, MICRO_STEPS // accumulation)
    facts, *table = (runs[1] / "profile" / OPERATORS).read_text().splitlines()
    last = {1: 6, 2: 8, 8: 24}[accumulation]
    assert facts.startswith(f"4 micro-steps, number {last - 3} to {last} of the process, in ")
    own = [line.split() for line in table if "aten::" in line]
    assert any(words[0] == "aten::mm" for words in own)
    shares = [float(words[1].rstrip("%")) for words in own]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    assert f"[profile] {facts}: {TRACE}" in (runs[1] / "train.log").read_text()


def test_off_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "MicroStepProfiler", None)
    assert Pretrainer(config(tmp_path, max_steps=4)).train() == 0
    with pytest.raises(TypeError):
        Pretrainer(config(tmp_path, max_steps=5), profile=True)


def test_a_dry_run_profiles_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = {
        "micro_batch_size": 2, "gradient_accumulation_steps": 2, "total_steps": 100,
        "warmup_steps": 3, "compile": False, "save_dir": str(tmp_path / "run"),
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL, "training": training}))
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "--config", str(path), "--dry-run", "--profile"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert "[dry-run] passed: 4 optimizer steps; nothing but the profile was written" in said
    files = sorted(p.relative_to(tmp_path / "run") for p in (tmp_path / "run").rglob("*.*"))
    assert files == [Path("profile") / OPERATORS, Path("profile") / TRACE]
    assert trace_names(tmp_path / "run").count("micro_step") == MICRO_STEPS


@pytest.mark.parametrize("opt_steps", [1, 3])
def test_a_run_that_ends_first_says_so_and_leaves_the_profiler_free(
    tmp_path: Path, opt_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, max_steps=opt_steps, warmup_steps=0)
    assert Pretrainer(settings, profile=True).train() == 0
    ended = f"[profile] nothing was written: the run ended after {2 * opt_steps} micro-steps"
    assert ended in capsys.readouterr().out
    assert list((tmp_path / "run" / "profile").iterdir()) == []
    assert Pretrainer(config(tmp_path, max_steps=12), profile=True).train() == 0
    assert trace_names(tmp_path / "run").count("micro_step") == MICRO_STEPS


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "profile" / TRACE).mkdir(parents=True)
    assert Pretrainer(config(tmp_path, max_steps=5), profile=True).train() == 0
    assert "[warn] the profile could not be written: " in capsys.readouterr().out
    assert losses(run)[-1][0] == 10, "the run went on"
    (run / "profile" / TRACE).rmdir()
    (run / "profile").rmdir()
    (run / "profile").write_text("in the way")
    with pytest.raises(UserError, match="profile: cannot write there .*leave --profile out"):
        Pretrainer(config(tmp_path, max_steps=6), profile=True)
