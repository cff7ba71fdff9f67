"""Checkpoints: a kill loses nothing, damage is noticed, what comes back is bitwise equal."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import mamba3_lite
from mamba3_lite.errors import UserError
from mamba3_lite.utils import checkpoint
from mamba3_lite.utils.checkpoint import (
    CheckpointManager,
    CheckpointWriteError,
    NonFiniteWeights,
    estimate_bytes,
    require_free_space,
)
from mamba3_lite.utils.weights import load_weights, raw_module

# Saves opt step argv[3] with weights full of argv[4] in a copy of argv[1], again and again, in a
# child that kills itself with SIGKILL at its first, second, ... file operation, until one survives.
KILLER = """
import os, shutil, signal, sys
import torch
from pathlib import Path
from mamba3_lite.utils import checkpoint

base, target, opt_step, value = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)
seen = 0

def point(limit):
    global seen
    seen += 1
    if seen == limit:
        os.kill(os.getpid(), signal.SIGKILL)

def watch(owner, name, limit, written=None):
    original = getattr(owner, name)
    def watched(*args, **kwargs):
        point(limit)
        result = original(*args, **kwargs)
        if written is not None:
            whole = written(*args)
            if seen + 1 == limit:  # as if the kill had come in the middle of the write
                os.truncate(whole, os.path.getsize(whole) // 2)
            point(limit)
        point(limit)
        return result
    setattr(owner, name, watched)

def save(folder, limit):
    watch(checkpoint, "save_file", limit, lambda tensors, path: path)
    watch(torch, "save", limit, lambda state, file: (file.flush(), file.name)[1])
    watch(Path, "write_bytes", limit, lambda path, data: path)
    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
        watch(owner, name, limit)
    tensors = {"w": torch.full((64,), value)}
    checkpoint.CheckpointManager(folder).save(opt_step, tensors, {"v": value}, {"v": value})
    return seen

def in_child(limit):
    folder = target / str(limit)
    shutil.copytree(base, folder)
    if (child := os.fork()) == 0:
        save(folder, limit)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

limit = 1
while in_child(limit) == -signal.SIGKILL:
    limit += 1
print(limit)
"""

# Saves ever newer opt steps, telling each one that was durable when the call returned.
ENDLESS = """
import itertools, sys
import torch
from mamba3_lite.utils.checkpoint import CheckpointManager
torch.set_num_threads(1)
manager = CheckpointManager(sys.argv[1], keep_last=2)
for opt_step in itertools.count(int(sys.argv[2])):
    tensors = {"w": torch.full((200_000,), float(opt_step))}
    manager.save(opt_step, tensors, {"v": float(opt_step)}, {"v": float(opt_step)})
    print(opt_step, flush=True)
"""


class Tied(nn.Module):
    """A small model with what makes checkpoints hard: a tied head and a complex parameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.A = nn.Parameter(torch.randn(width, dtype=torch.complex64))
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head((self.embed(ids) * self.A).real)


def package_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(mamba3_lite.__file__).parent.parent)}


def save_value(manager: CheckpointManager, opt_step: int, value: float) -> None:
    manager.save(opt_step, {"w": torch.full((64,), value)}, {"v": value}, {"v": value})


def loaded_value(manager: CheckpointManager, opt_step: int | None = None) -> float:
    """The one value that all three files of the loaded checkpoint hold."""
    loaded = manager.load(opt_step)
    assert loaded is not None
    value = loaded.meta["v"]
    assert torch.equal(loaded.model["w"], torch.full_like(loaded.model["w"], value))
    assert loaded.training == {"v": value}
    return value


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def step_names(*opt_steps: int) -> set[str]:
    pairs = (("model", "safetensors"), ("optim", "pt"), ("meta", "json"))
    return {f"{kind}_step_{n}.{suffix}" for n in opt_steps for kind, suffix in pairs}


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


# --- kills and damage -------------------------------------------------------------------------


@pytest.mark.parametrize(("opt_step", "before"), [(2, 1.0), (1, 1.0)], ids=["new", "same"])
def test_acc8_b06_kill_or_corrupt_a_save(tmp_path: Path, opt_step: int, before: float) -> None:
    # case B06: SIGKILL before, inside and after every file operation of one save, of a new step and
    # over the only checkpoint there is.
    base, target = tmp_path / "base", tmp_path / "killed"
    save_value(CheckpointManager(base), 1, before)
    target.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", KILLER, base, target, str(opt_step), "2.0"],
        env=package_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    points = int(run.stdout)
    assert points > 20
    outcomes = []
    for point in range(1, points + 1):
        lines: list[str] = []
        manager = CheckpointManager(target / str(point), log=lines.append)
        assert all(manager.verify(step) is None for step in manager.steps())
        outcomes.append(loaded_value(manager))
        assert lines[-1].startswith("[checkpoint] loaded step ")
        save_value(manager, 3, 3.0)
        assert names(manager.directory) == step_names(*manager.steps())  # no temporary file left
        assert [manager.verify(step) for step in manager.steps()] == [None] * len(manager.steps())
    # The old checkpoint up to one point, the new one from there on; both are seen.
    assert outcomes == sorted(outcomes)
    assert outcomes[0] == before and outcomes[-1] == 2.0


@pytest.mark.campaign
def test_acc8_b06_kill_at_random_moments(tmp_path: Path) -> None:
    # case B06: 20 kills at random moments of saving and pruning, each followed by a resume.
    chance, folder, newest = random.Random(6), tmp_path / "run", 0
    for _ in range(20):
        command = [sys.executable, "-c", ENDLESS, str(folder), str(newest + 1)]
        child = subprocess.Popen(command, env=package_environment(), stdout=subprocess.PIPE)
        assert child.stdout is not None
        reported = [int(child.stdout.readline())]
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(chance.uniform(0.0, 0.3))
        child.kill()
        reported += [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
        newest = int(loaded_value(CheckpointManager(folder)))
        assert newest in (reported[-1], reported[-1] + 1)


@pytest.mark.parametrize("kind", ["model", "optim", "meta"])
def test_acc8_b06_damage_to_each_file_is_noticed_and_passed_over(tmp_path: Path, kind: str) -> None:
    # case B06
    lines: list[str] = []
    manager = CheckpointManager(tmp_path, log=lines.append)
    for opt_step in (10, 20, 30):
        save_value(manager, opt_step, float(opt_step))
    victim = next(tmp_path.glob(f"{kind}_step_30.*"))
    intact = victim.read_bytes()
    spots = [0, 9, len(intact) // 3, len(intact) // 2, len(intact) - 1]
    damages = [partial(flip, victim, spot, spot % 8) for spot in spots]
    damages += [partial(os.truncate, victim, n) for n in (0, len(intact) // 2, len(intact) - 1)]
    for damage in damages:
        damage()
        lines.clear()
        assert loaded_value(manager) == 20.0
        assert len(lines) == 2
        assert lines[0].startswith(f"[checkpoint] step 30 passed over: {victim.name} ")
        assert lines[1].startswith("[checkpoint] loaded step 20 ")
        victim.write_bytes(intact)
    assert loaded_value(manager) == 30.0


def test_any_flipped_byte_of_the_meta_file_is_noticed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(7, {"w": torch.ones(2)}, {}, {"run": "a b", "nested": {"x": [1.5, None, True]}})
    record = tmp_path / "meta_step_7.json"
    intact = record.read_bytes()
    for offset in range(len(intact)):
        flip(record, offset, offset % 8)
        assert manager.verify(7) is not None, offset
        record.write_bytes(intact)
    record.write_bytes(intact.replace(b"\n", b"\n "))  # the same values, other bytes
    assert manager.verify(7) == "meta_step_7.json is damaged (its own SHA-256 differs)"
    record.write_bytes(intact)
    assert manager.verify(7) is None


def test_hashes_are_checked_before_anything_is_deserialised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    save_value(manager, 1, 1.0)
    flip(tmp_path / "optim_step_1.pt", 40)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("deserialised a damaged checkpoint")

    for owner, name in ((torch, "load"), (checkpoint, "load_file"), (checkpoint, "safe_open")):
        monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(UserError, match="no intact checkpoint"):
        manager.load(None)


def test_a_rename_that_fails_is_finished_by_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    save_value(manager, 1, 1.0)

    def fail(source: object, target: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(CheckpointWriteError, match="checkpoint of step 1 could not be written"):
            save_value(manager, 1, 2.0)
    lines: list[str] = []
    assert loaded_value(CheckpointManager(tmp_path, log=lines.append)) == 2.0
    assert lines[0] == "[checkpoint] finished the interrupted save of step 1"
    assert names(tmp_path) == step_names(1)


# --- what is written and what comes back ------------------------------------------------------


def test_acc9_b09_checkpoint_round_trip(tmp_path: Path) -> None:
    # case B09: tied and complex, compiled and plain, every (save, load) pair.
    ids = torch.arange(11)[None]
    forms = {"plain": lambda m: m, "compiled": lambda m: torch.compile(m, backend="eager")}
    for opt_step, (saving, loading) in enumerate([(a, b) for a in forms for b in forms]):
        source, target = forms[saving](Tied()), forms[loading](Tied())
        assert not torch.equal(source(ids), target(ids))
        manager = CheckpointManager(tmp_path)
        manager.save(opt_step, raw_module(source).state_dict(), {}, {})
        loaded = manager.load(opt_step)
        assert loaded is not None
        assert loaded.model["lm_head.weight"] is loaded.model["embed.weight"]
        load_weights(target, loaded.model)
        plain = dict(raw_module(target).named_parameters(remove_duplicate=False))
        assert plain["lm_head.weight"] is plain["embed.weight"]
        assert plain["A"].dtype == torch.complex64
        assert torch.equal(plain["A"], raw_module(source).state_dict()["A"])
        assert torch.equal(source(ids), target(ids))


def test_tied_tensors_are_stored_once_and_views_apart(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {"a": flat[:6], "b": flat[3:9], "tied": flat[:6], "t": flat.view(3, 4).T}
    tensors |= {"empty": torch.empty(0), "none": torch.empty(0)}
    manager = CheckpointManager(tmp_path)
    manager.save(1, tensors, {}, {})
    with safe_open(tmp_path / "model_step_1.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"a", "b", "t", "empty", "none"}
        assert json.loads(file.metadata()["aliases"]) == {"tied": "a"}
    loaded = manager.load(1)
    assert loaded is not None
    assert loaded.model.keys() == tensors.keys()
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in tensors.items())


def test_training_state_is_loaded_with_weights_only(tmp_path: Path) -> None:
    # case B10: optimizer, schedule and random state, complex moments included.
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        [2],
    )
    for _ in range(3):
        model(torch.arange(11)).square().sum().backward()
        optimizer.step()
        schedule.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "python_rng": random.getstate(),
    }
    manager = CheckpointManager(tmp_path)
    manager.save(3, model.state_dict(), state, {"tuple": (1, 2), "numbers": {2: "b", 10: "a"}})
    loaded = manager.load(3)
    assert loaded is not None
    torch.testing.assert_close(loaded.training, state, rtol=0, atol=0)
    assert loaded.meta == {"tuple": [1, 2], "numbers": {"2": "b", "10": "a"}}
    fresh = torch.optim.AdamW(Tied().parameters(), lr=1.0)
    fresh.load_state_dict(loaded.training["optimizer"])
    assert fresh.state_dict()["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(1.0), r"training_state\['a'\]\[1\] is a numpy.float64"),
        (1j, r"training_state\['a'\]\[1\] is a builtins.complex"),
        (random.Random(), r"training_state\['a'\]\[1\] is a random.Random"),
        ({np.int64(1): 2}, r"key of training_state\['a'\]\[1\] is a numpy.int64"),
    ],
)
def test_what_weights_only_would_refuse_is_refused_at_the_save(
    tmp_path: Path, value: object, words: str
) -> None:
    # case B10
    with pytest.raises(TypeError, match=words):
        CheckpointManager(tmp_path).save(1, {"w": torch.ones(1)}, {"a": [0, value]}, {})
    assert names(tmp_path) == set()


@pytest.mark.parametrize("bad", [{"loss": float("nan")}, {"path": Path("x")}])
def test_meta_that_is_not_json_leaves_nothing_behind(tmp_path: Path, bad: dict) -> None:
    with pytest.raises((ValueError, TypeError)):
        CheckpointManager(tmp_path).save(1, {"w": torch.ones(1)}, {}, bad)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    "bad", [torch.tensor([1.0, float("nan")]), torch.tensor([complex(0.0, float("inf"))])]
)
def test_non_finite_weights_are_never_saved(tmp_path: Path, bad: Tensor) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(NonFiniteWeights, match="step 4 not written: 1 tensors .*: layers.0.A"):
        manager.save(4, {"ok": torch.ones(2), "layers.0.A": bad}, {}, {})
    assert names(tmp_path) == set()


# --- a full disk ------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1000, 100_000], ids=["model", "training state"])
def test_a_write_beyond_the_limit_leaves_the_older_checkpoint_untouched(
    tmp_path: Path, limit: int
) -> None:
    # case B07: the kernel itself refuses to write on, in the model file or in the optimizer's.
    manager = CheckpointManager(tmp_path)
    save_value(manager, 1, 1.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"moments": torch.zeros(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointWriteError, match="step 1 could not .*: .*File too large"):
            manager.save(1, {"w": torch.zeros(1000)}, state, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert loaded_value(manager) == 1.0


@pytest.mark.parametrize("owner, name", [(os, "fsync"), (Path, "write_bytes"), (Path, "mkdir")])
def test_no_space_left_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    # case B07
    manager = CheckpointManager(tmp_path)
    save_value(manager, 1, 1.0)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(CheckpointWriteError) as caught:
        save_value(manager, 2, 2.0)
    assert "step 2" in str(caught.value) and "No space left on device" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == step_names(1)


def test_free_space_is_compared_with_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case B07
    tied = Tied().state_dict()
    weights = (11 * 8) * 4 + 8 * 8
    assert estimate_bytes(tied) == 3 * weights + 2**20
    folder = tmp_path / "not" / "there"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 6, 2**30))
    require_free_space(folder, 2**30)
    with pytest.raises(UserError, match="there needs 4.00 GiB .* only 1.00 GiB are free"):
        require_free_space(folder, 2**32)
    assert not folder.exists()


# --- finding, keeping and removing ------------------------------------------------------------


def test_a_folder_without_checkpoints_gives_none_and_is_not_created(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    assert CheckpointManager(folder).load(None) is None
    assert not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert CheckpointManager(folder).load(None) is None
    with pytest.raises(UserError, match="step 5 .* model_step_5.safetensors is missing; .*: none"):
        CheckpointManager(folder).load(5)


def test_an_explicit_step_is_that_step_or_an_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for opt_step in (9, 10, 100):
        save_value(manager, opt_step, float(opt_step))
    assert manager.steps() == [9, 10, 100]
    assert loaded_value(manager, 10) == 10.0
    with pytest.raises(UserError, match="step 11 .*is missing; steps available: 9, 10, 100"):
        manager.load(11)
    flip(tmp_path / "optim_step_10.pt", 60)
    with pytest.raises(UserError, match="step 10 .*optim_step_10.pt is damaged.*: 9, 10, 100"):
        manager.load(10)


@pytest.mark.parametrize("kind", ["model", "optim", "meta"])
def test_checkpoints_of_which_none_is_intact_are_an_error(tmp_path: Path, kind: str) -> None:
    # case B06: a resume that finds only wrecks must not start from scratch.
    lines: list[str] = []
    manager = CheckpointManager(tmp_path, log=lines.append)
    save_value(manager, 5, 5.0)
    next(tmp_path.glob(f"{kind}_step_5.*")).unlink()
    assert manager.steps() == []
    with pytest.raises(UserError, match=r"no intact checkpoint \(damaged or partial: steps 5\)"):
        manager.load(None)
    assert lines[0].startswith(f"[checkpoint] step 5 passed over: {kind}_step_5.")


def test_another_layout_is_refused_with_a_reason(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save_value(manager, 1, 1.0)
    (tmp_path / "meta_step_1.json").write_text('{"step": 1}')
    assert manager.verify(1) == (
        "meta_step_1.json is damaged or not a record of ours ('mamba3-lite checkpoint 1')"
    )
    for kind, suffix in (("model", "safetensors"), ("optim", "pt"), ("meta", "json")):
        shutil.copy(tmp_path / f"{kind}_step_1.{suffix}", tmp_path / f"{kind}_step_2.{suffix}")
    save_value(manager, 1, 1.0)
    shutil.copy(tmp_path / "meta_step_1.json", tmp_path / "meta_step_2.json")
    assert manager.verify(2) == "meta_step_2.json belongs to step 1"


def test_pruning_keeps_the_newest_and_every_nth(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=4)
    for opt_step in range(1, 11):
        save_value(manager, opt_step, float(opt_step))
    assert manager.steps() == [4, 8, 9, 10]
    assert names(tmp_path) == step_names(4, 8, 9, 10)
    assert [loaded_value(manager, step) for step in (4, 8, 9, 10)] == [4.0, 8.0, 9.0, 10.0]


def test_the_one_just_saved_is_kept_although_others_have_higher_numbers(tmp_path: Path) -> None:
    for opt_step in (80, 100, 120):
        save_value(CheckpointManager(tmp_path), opt_step, 0.0)
    save_value(CheckpointManager(tmp_path, keep_last=1), 90, 1.0)
    assert CheckpointManager(tmp_path).steps() == [90, 120]


def test_only_complete_checkpoints_of_ours_are_removed(tmp_path: Path) -> None:
    old = CheckpointManager(tmp_path)
    for opt_step in (1, 2, 3):
        save_value(old, opt_step, float(opt_step))
    (tmp_path / "optim_step_1.pt").unlink()  # incomplete
    (tmp_path / "meta_step_2.json").write_text("{}")  # not ours any more
    foreign = {"model_step_03.safetensors", "model_step_4.pt", "notes.txt", "meta_step_9.json.bak"}
    foreign |= {".mamba3lite-tmp-x", ".mamba3lite-tmp-1-notes.txt"}
    for name in foreign:
        (tmp_path / name).write_text("keep me")
    before = names(tmp_path)
    save_value(CheckpointManager(tmp_path, keep_last=1), 5, 5.0)
    assert names(tmp_path) == (before - step_names(3)) | step_names(5)


def test_only_temporary_files_of_dead_processes_are_cleaned(tmp_path: Path) -> None:
    dead = tmp_path / f".mamba3lite-tmp-{dead_pid()}-model_step_3.safetensors"
    own = tmp_path / f".mamba3lite-tmp-{os.getpid()}-meta_step_3.json"
    alive = tmp_path / f".mamba3lite-tmp-{os.getppid()}-model_step_3.safetensors"
    for path in (dead, own, alive):
        path.write_bytes(b"half")
    manager = CheckpointManager(tmp_path)
    assert manager.load(None) is None
    assert dead.exists() and own.exists()  # only a save cleans
    save_value(manager, 4, 4.0)
    assert names(tmp_path) == step_names(4) | {alive.name}


def test_an_interrupted_removal_leaves_no_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for opt_step in (1, 2):
        save_value(CheckpointManager(tmp_path), opt_step, float(opt_step))
    manager = CheckpointManager(tmp_path, keep_last=1)
    rename, unlink = os.replace, Path.unlink
    calls = []

    def stop(limit: int, original, *args: object) -> None:
        calls.append(args)
        if len(calls) == limit:
            raise KeyboardInterrupt
        original(*args)

    for limit in range(1, 7):  # three renames, then three deletions
        calls.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", lambda *a, n=limit: stop(n, rename, *a))
            patch.setattr(Path, "unlink", lambda *a, n=limit: stop(n, unlink, *a))
            manager.prune()
        save_value(manager, 3, 3.0)
        assert names(tmp_path) == step_names(3)
        for opt_step in (1, 2):
            save_value(CheckpointManager(tmp_path), opt_step, float(opt_step))
        (tmp_path / "meta_step_3.json").unlink()
        (tmp_path / "model_step_3.safetensors").unlink()
        (tmp_path / "optim_step_3.pt").unlink()
        manager = CheckpointManager(tmp_path, keep_last=1)


# --- strict loading ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("A"), r"1 missing: A;"),
        (lambda t: t.pop("lm_head.weight"), r"1 missing: lm_head.weight;"),
        (lambda t: t.update({f"_orig_mod.x{i}": t["A"] for i in range(5)}),
         r"5 unexpected: _orig_mod.x0, _orig_mod.x1, _orig_mod.x2 and 2 more;"),
        (lambda t: t.update(A=t["A"][:4]), r"1 of another shape or dtype: A \(model \(8,\)"),
        (lambda t: t.update(A=t["A"].real.clone()), r"shape or dtype: A .*float32\);"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}),
         r"tied in the model but different: lm_head.weight and embed.weight"),
        (lambda t: t.update(b=t.pop("A")), r"1 missing: A; 1 unexpected: b;"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name(change, words: str) -> None:
    # case B09: a renamed or missing key raises, and the model stays as it was.
    tensors, model = dict(Tied().state_dict()), Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(tensors)
    with pytest.raises(UserError, match=words):
        load_weights(model, tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
