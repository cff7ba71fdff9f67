"""A run that hangs ends and says where; a run that gets on says so to people and to Prometheus."""

import ctypes
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mamba3_lite.distributed.world import World, join_world
from mamba3_lite.training import heartbeat as heartbeat_module
from mamba3_lite.training import stop, watchdog
from mamba3_lite.training.heartbeat import EXIT_CODE, HEARTBEAT, METRICS, STATES, Heartbeat
from mamba3_lite.training.pretrain import Pretrainer
from mamba3_lite.training.stop import EXIT_OUT_OF_TIME, StopRequest
from mamba3_lite.training.watchdog import EXIT_HUNG
from mamba3_lite.utils.logging import read_metrics
from tests import ranks, runs
from tests.test_docs import table

SAMPLE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\S+)')


def prometheus(text: str) -> dict[str, float]:
    """Samples by name and labels; as strict as the text format asks of whoever writes it."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    lines = text.splitlines()
    while lines:
        helps = re.fullmatch(r"# HELP ([a-z][a-z0-9_]*) (\S.*)", lines.pop(0))
        assert helps is not None
        kind = re.fullmatch(rf"# TYPE {helps[1]} (gauge|counter)", lines.pop(0))
        assert kind is not None and helps[1] not in kinds
        kinds[helps[1]] = kind[1]
        assert (kind[1] == "counter") == helps[1].endswith("_total")
        while lines and not lines[0].startswith("#"):
            sample = SAMPLE.fullmatch(lines.pop(0))
            assert sample is not None and sample[1] == helps[1]
            key = sample[1] + "".join(re.findall(r'state="(\w+)"', sample[2]))
            assert key not in found
            found[key] = float(sample[3])
        assert any(key.startswith(helps[1]) for key in found)
    return found


@pytest.mark.parametrize(
    "broken",
    [
        'mamba3_loss{run="a"} 1\n', '# HELP a b\n# TYPE a gauge\na{run="x"} one\n',
        '# HELP a b\n# TYPE a counter\na{run="x"} 1\n', '# HELP a b\n# TYPE a gauge\na{run="x"} 1',
        '# HELP a b\n# TYPE a gauge\na{run="\n"} 1\n', '# HELP a b\n# TYPE a gauge\n',
    ],
)  # fmt: skip
def test_the_reader_of_these_tests_refuses_what_prometheus_would(broken: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        prometheus(broken)


def heartbeat(folder: Path) -> dict:
    return json.loads((folder / HEARTBEAT).read_text(encoding="utf-8"))


def test_a_run_leaves_its_newest_numbers_and_its_exit_code(tmp_path: Path) -> None:
    runs.write_tokens(tmp_path / "val.bin", 24 * 7 + 1)
    settings = runs.config(tmp_path, val_data_path=str(tmp_path / "val.bin"))
    before = time.time()
    assert Pretrainer(settings).train() == 0
    row, validation = (
        [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == kind][-1]
        for kind in ("train", "val")
    )
    said = heartbeat(tmp_path / "run")
    assert said["state"] == "done" and before <= said["time"] <= time.time()
    assert (said["opt_step"], said["micro_step"]) == (12, 24)
    assert said["last_checkpoint_opt_step"] == 12
    assert said["loss"] == pytest.approx(row["loss"]) and said["tps"] == pytest.approx(row["tps"])
    found = prometheus((tmp_path / "run" / METRICS).read_text(encoding="utf-8"))
    assert found["mamba3_opt_step"] == 12 and found["mamba3_last_checkpoint_opt_step"] == 12
    assert found["mamba3_loss"] == pytest.approx(row["loss"])
    assert found["mamba3_validation_loss"] == pytest.approx(validation["val_loss"])
    assert found["mamba3_tokens_seen_total"] == row["tokens_seen"]
    assert found["mamba3_peak_memory_bytes"] == pytest.approx(row["peak_mem_gib"] * 2**30)
    assert found["mamba3_heartbeat_timestamp_seconds"] == said["time"]
    assert {s for s in STATES if found[f"mamba3_state{s}"]} == {"done"}
    assert (tmp_path / "run" / EXIT_CODE).read_text() == "0\n"
    assert [t.name for t in threading.enumerate() if t.name == "watchdog"] == []


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, EXIT_OUT_OF_TIME)],
)
def test_a_stopped_run_leaves_the_code_it_ends_with(tmp_path: Path, number, code: int) -> None:
    settings = runs.config(tmp_path)
    assert runs.stop_after(settings, 5, number) == code
    assert (tmp_path / "run" / EXIT_CODE).read_text() == f"{code}\n"
    assert heartbeat(tmp_path / "run")["state"] == "stopped"


def test_a_run_that_fails_does_not_show_the_code_of_the_one_before(tmp_path: Path) -> None:
    settings = runs.config(tmp_path)
    runs.stop_after(settings, 5)

    class Failing(Pretrainer):
        def _micro_step(self, *batch: torch.Tensor) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Failing(settings).train()
    assert not (tmp_path / "run" / EXIT_CODE).exists()
    assert heartbeat(tmp_path / "run")["state"] == "failed"


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    assert Pretrainer(runs.config(tmp_path), dry_run=True).train() == 0
    assert not (tmp_path / "run").exists()


def test_odd_names_and_numbers_are_written_as_each_format_wants_them(tmp_path: Path) -> None:
    folder = tmp_path / 'a "run"\\of\nmine'
    folder.mkdir()
    Heartbeat(folder, rank=0).write("training", 1.5, {"loss": math.nan, "tps": math.inf})
    assert heartbeat(folder) == {"state": "training", "time": 1.5, "loss": None, "tps": None}
    text = (folder / METRICS).read_text(encoding="utf-8")
    found = prometheus(text)
    assert math.isnan(found["mamba3_loss"]) and found["mamba3_tokens_per_second"] == math.inf
    assert r'run="a \"run\"\\of\nmine"' in text
    assert sorted(p.name for p in folder.iterdir()) == [HEARTBEAT, METRICS]


def test_validating_and_saving_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    beat = watchdog.Watchdog.beat

    def noted(self, doing: str = "training", **facts: float) -> None:
        told.append(doing)
        beat(self, doing, **facts)

    monkeypatch.setattr(watchdog.Watchdog, "beat", noted)
    runs.write_tokens(tmp_path / "val.bin", 24 * 7 + 1)
    settings = runs.config(tmp_path, val_data_path=str(tmp_path / "val.bin"), max_steps=4)
    assert Pretrainer(settings).train() == 0
    assert told.count("validating") == 3  # 7 windows, 3 at once
    assert told.count("saving") == 1 and told[-1] == "done"


def test_a_full_disk_costs_the_heartbeat_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self, *what: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Heartbeat, "write", full)
    assert Pretrainer(runs.config(tmp_path)).train() == 0
    said = capsys.readouterr().err
    assert said.count("[warn] no heartbeat: [Errno 28] No space left on device") == 1


def test_an_echo_of_a_signal_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    with StopRequest(0) as request:
        assert request.code is None
        signal.raise_signal(signal.SIGTERM)
        now += 1
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert request.code == 143
        now += 5
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_launcher_may_ask_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stop.time, "monotonic", lambda: now)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as recipes/launch.sh starts a rank
    try:
        with StopRequest(0) as request:
            for _ in range(20):
                signal.raise_signal(signal.SIGUSR1)
                now += 1
            assert request.code == EXIT_OUT_OF_TIME and request.reason == "SIGUSR1"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_limit_among_several_ranks(tmp_path: Path) -> None:
    def limits(size: int, **changes: float) -> tuple[float, float]:
        world = World(torch.device("cpu"), size=size)
        dog = watchdog.Watchdog(tmp_path, world, runs.config(tmp_path, **changes))
        return dog._first_limit_sec, dog._limit_sec

    assert limits(1) == (1800, 1800)
    # Before the others give up, but not while the first micro-step compiles.
    assert limits(2) == (1800, 540)
    assert limits(2, watchdog_sec=60) == (60, 60)
    assert limits(2, watchdog_sec=0) == (0, 0)


class Hanging(Pretrainer):
    """Hangs in C from micro-step 3 on, on the last rank: in C, so that no signal handler runs."""

    keeps_the_lock = False

    def _micro_step(self, *batch: torch.Tensor) -> None:
        super()._micro_step(*batch)
        if self.state.micro_step == 3 and self.world.rank == self.world.size - 1:
            hang_here(self.keeps_the_lock)


def hang_here(keeps_the_lock: bool) -> None:
    (ctypes.PyDLL if keeps_the_lock else ctypes.CDLL)(None).sleep(100)


def hang(folder: Path, **changes: float) -> None:
    """What a process of the tests below does."""
    torch.set_num_threads(1)
    with join_world(60) as world:
        Hanging(runs.config(folder, **changes), world=world).train()


def test_a_rank_that_hangs_ends_all_and_every_stack_is_there(tmp_path: Path) -> None:
    runs.config(tmp_path)  # writes the data
    code = f"from tests.test_watchdog import *; hang(Path({str(tmp_path)!r}), rank_timeout_sec=2)"
    first, second = ranks.finish(ranks.start(2, ["-c", code]))
    assert [first.returncode, second.returncode] == [EXIT_HUNG] * 2
    for rank, done, where in ((0, first, "distributed_c10d.py"), (1, second, "in hang_here")):
        stacks = (tmp_path / "run" / f"stacks_rank_{rank}.txt").read_text(encoding="utf-8")
        for text in (stacks, done.stderr):
            assert f"[watchdog] rank {rank}: nothing has ended for " in text
            assert where in text and "in _train_to" in text
    assert (tmp_path / "run" / EXIT_CODE).read_text() == f"{EXIT_HUNG}\n"
    said = heartbeat(tmp_path / "run")
    assert said["state"] == "hung" and said["micro_step"] in (2, 3)
    # Nothing that was saved is lost, and the folder is free.
    assert Pretrainer(runs.config(tmp_path)).train() == 0


@pytest.mark.campaign
def test_a_hang_that_keeps_the_interpreters_lock_ends_too(tmp_path: Path) -> None:
    runs.config(tmp_path)
    code = (
        "from tests.test_watchdog import *; watchdog._GRACE_SEC = 1.0; "
        f"Hanging.keeps_the_lock = True; hang(Path({str(tmp_path)!r}), watchdog_sec=2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ranks.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in hang_here" in done.stderr


def test_the_page_names_the_metrics_and_the_states(tmp_path: Path) -> None:
    page = "docs/guides/many_gpus.md"
    rows = table(page, "metric", "type", "meaning")
    facts = {metric.field: 1.0 for metric in heartbeat_module._METRICS}
    Heartbeat(tmp_path, rank=0).write("training", 1.0, facts)
    text = (tmp_path / METRICS).read_text(encoding="utf-8")
    assert re.findall(r"# TYPE (\S+) (\S+)", text) == [(row[0], row[1]) for row in rows]
    assert [row[0] for row in table(page, "state", "the run")] == list(STATES)
