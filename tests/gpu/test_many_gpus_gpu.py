"""All GPUs of this host over NCCL, against one: equal losses, gradients of A, resume, NaN.

On a host with one GPU a group of one rank is tried, which exchanges nothing.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mamba3_lite.models import ssd_triton
from tests import ranks, runs
from tests.test_parallel import Job, furthest, rows, run, said, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton"),
]
ALL = max(n for n in (1, 2, 4, 8) if n <= max(1, torch.cuda.device_count()))
MODES = ("ddp", "fsdp", *(("hsdp",) if ALL >= 4 else ()))
SEQUENCES, STOP_AT = 16, 15
MODEL = {"ssd_dispatch": "fused", "head_dim": 16, "state_dim": 16, "d_model": 64, "ffn_dim": 96}
PRECISIONS = {"float32": (True, 1e-5), "bfloat16": (False, 1e-3)}


def geometry(n: int) -> dict[str, Any]:
    """The same 16 sequences an optimizer step, in two micro-steps."""
    return {
        "batch_size": SEQUENCES // 2 // n, "gradient_accumulation_steps": 2, "model": MODEL,
        "lr": 3e-4, "compile_model": False,
    }  # fmt: skip


def jobs_of(n: int, mode: str) -> list[Job]:
    shared = {**geometry(n), "parallel_mode": mode, "shard_ranks": n // 2 if mode == "hsdp" else 0}
    found: list[Job] = []
    for precision, (wide, _) in PRECISIONS.items():
        told = {"float32": wide, "keep_gradients": True}
        long = {"max_steps": 50, "save_every": 100, "_": told}
        found.append((f"whole-{precision}-{mode}-{n}", {**shared, **long}))
    found.append((f"through-{mode}-{n}", {**shared, "_": {"float32": True}}))
    stopped = {"checkpoint_format": "sharded", "_": {"float32": True, "signal_at": STOP_AT}}
    found.append((f"stopped-{mode}-{n}", {**shared, **stopped}))
    for kind, told in (("loss", {"nan_loss_at": 5}), ("gradient", {"nan_gradient_at": [5]})):
        found.append((f"nan-{kind}-{mode}-{n}", {**shared, "_": {"float32": True, **told}}))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Everything that runs here, one group of ranks after the other."""
    where = tmp_path_factory.mktemp("gpus")
    runs.write_tokens(where / "train.bin", 24 * 101 + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "TIMEOUT_SEC", 400)  # kernels are compiled and tested
        run(1, where, jobs_of(1, "ddp"))
        run(
            ALL,
            where,
            [job for mode in MODES for job in jobs_of(ALL, mode) if ALL > 1 or mode != "ddp"],
        )
        # What all GPUs saved one goes on with, and all again with what that one saved.
        for n, before, name in ((1, "stopped", "one"), (ALL, "one", "again")):
            jobs: list[Job] = []
            for mode in MODES:
                old, new = (where / f"{stage}-{mode}-{ALL}" for stage in (before, name))
                shutil.copytree(old / "run", new / "run")
                told: dict[str, Any] = {"float32": True}
                if name == "one":
                    told["signal_at"] = STOP_AT + 4
                how = {"parallel_mode": mode if n > 1 else "ddp", "checkpoint_format": "sharded"}
                jobs.append((new.name, {**geometry(n), **how, "_": told}))
            run(n, where, jobs)
        yield where


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", MODES)
def test_losses_of_50_optimizer_steps_are_those_of_one_gpu(folder, mode, precision):
    limit = PRECISIONS[precision][1]
    want = rows(folder, f"whole-{precision}-ddp-1")
    got = rows(folder, f"whole-{precision}-{mode}-{ALL}")
    assert [r["micro_step"] for r in got] == [r["micro_step"] for r in want] and len(want) == 100
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(got, want, strict=True)) < limit
    assert want[-1]["loss"] < want[0]["loss"] - 0.05
    found = said(folder, f"whole-{precision}-{mode}-{ALL}")
    assert len(found) == ALL and len({one["weights"] for one in found}) == 1
    assert all(one["tied"] for one in found)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_complex_a_is_the_mean_of_the_ranks(folder, mode):
    (alone,) = said(folder, "whole-float32-ddp-1")
    together = said(folder, f"whole-float32-{mode}-{ALL}")
    want = torch.tensor(alone["complex_gradients"][0])
    assert want.shape[0] == 2 and float(want.abs().max()) > 0
    for rank in together:
        got = torch.tensor(rank["complex_gradients"][0])
        assert float((got - want).norm() / want.norm()) < 1e-5
    assert len({json.dumps(rank["complex_gradients"]) for rank in together}) == 1


@pytest.mark.parametrize("mode", MODES)
def test_all_then_one_then_all_go_on_as_if_never_stopped(folder, mode):
    want = {r["micro_step"]: r["loss"] for r in rows(folder, "through-ddp-1")}
    got = {r["micro_step"]: r["loss"] for r in rows(folder, f"again-{mode}-{ALL}")}
    assert sorted(got) == sorted(want) == list(range(1, 25))
    assert max(abs(got[m] - want[m]) for m in want) < 1e-5
    assert furthest(weights(folder, f"again-{mode}-{ALL}"), weights(folder, "through-ddp-1")) < 1e-5
    codes = [[one["code"] for one in said(folder, f"{n}-{mode}-{ALL}")] for n in ("one", "again")]
    assert codes == [[143], [0] * ALL]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_drops_the_window_on_all(folder, kind, mode):
    found = said(folder, f"nan-{kind}-{mode}-{ALL}")
    assert [one["state"]["dropped_windows"] for one in found] == [1] * ALL
    assert len({one["weights"] for one in found}) == 1
    got = weights(folder, f"nan-{kind}-{mode}-{ALL}")
    assert furthest(got, weights(folder, "nan-loss-ddp-1")) < 1e-5
