"""`mamba3-lite doctor`: what it sees, what has to be mended, and that it never stumbles."""

import json
import re
import tomllib
import warnings
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mamba3_lite import cli, env
from mamba3_lite.measure import doctor
from mamba3_lite.models import ssd_backends
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.training.config import TrainingConfig
from tests.test_imports import OPTIONAL, run_hidden

ROOT = Path(__file__).resolve().parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without GPU")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", *arguments])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (code, "")
    return captured.out


def flat(text: str) -> str:
    """Table lines and line ends as single blanks."""
    return " ".join(re.sub("[─-╿]", " ", text).split())


def problem_of(findings: Any, topic: str) -> str | None:
    (finding,) = [finding for finding in findings if finding.topic == topic]
    return finding.problem


def write_run(folder: Path, **model: Any) -> Path:
    """A small configuration and its data."""
    torch.save(torch.arange(5000) % 50, folder / "tokens.bin")
    keys = {"d_model": 32, "n_layers": 1, "n_heads": 2, "head_dim": 16, "state_dim": 16} | model
    lines = ["model:", *(f"  {key}: {value}" for key, value in keys.items())]
    lines += ["  max_seq_len: 64", "training:", "  total_steps: 4", "  warmup_steps: 1"]
    lines += [
        f"  save_dir: {folder / 'run'}",
        f"data: {{train_data_path: {folder / 'tokens.bin'}}}",
    ]
    path = folder / "run.yaml"
    path.write_text("\n".join(lines))
    return path


@on_a_cpu
def test_a_machine_without_a_gpu_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    ssd_backends._choose.cache_clear()
    text = flat(run(capsys))
    assert "train in float32 on the CPU" in text and torch.__version__ in text
    for name in (*ssd_backends.BACKENDS, "auto"):
        assert f"ssd_dispatch: {name}" in text
    assert "takes rotated (parity with the oracle on cpu:" in text
    assert "not 'fused': the tensors are on 'cpu', not on CUDA." in text
    assert text.endswith("this machine can train") and "[ssd]" not in text


@on_a_cpu
def test_json_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    ssd_backends._choose.cache_clear()
    record = json.loads(run(capsys, "--json"))
    assert record["can_train"] is True
    topics = [finding["topic"] for finding in record["findings"]]
    assert {"Python", "torch", "Triton", "GPU", "CPU", "torch.compile", "disk"} <= set(topics)
    assert len(topics) == len(set(topics))


@on_a_cpu
def test_nothing_optional_needs_to_be_there() -> None:
    script = """
import contextlib, io
from mamba3_lite import cli
with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
        cli.main(["doctor", "--json"])
    except SystemExit as stop:
        code = stop.code
print(json.dumps([code, json.loads(out.getvalue())]))
"""
    code, record = json.loads(run_hidden(script, hidden={*OPTIONAL, "zstandard", "datasets"}))
    texts = {finding["topic"]: finding["text"] for finding in record["findings"]}
    assert code == 0 and record["can_train"]
    assert texts["Triton"] == "not installed"
    assert texts["ssd_dispatch: fused"] == "refuses: Triton is not installed."
    assert "pip install" in texts["extra plots"] and "[zstd]" in texts["extra zstd"]


@on_a_cpu
def test_a_run_is_asked_for_data_and_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run(tmp_path)
    assert "this machine can train" in run(capsys, "--config", str(config))
    (tmp_path / "tokens.bin").unlink()
    text = run(capsys, "--config", str(config), code=1)
    assert f"[mend] no data at {tmp_path / 'tokens.bin'}" in text and "mend this first" in text
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(10, 9, 1))
    text = run(capsys, "--config", str(config), "--json", code=1)
    problems = [f["problem"] for f in json.loads(text)["findings"] if f["problem"]]
    assert len(problems) == 2 and any("too little room" in problem for problem in problems)


@on_a_cpu
def test_a_path_that_the_run_names_must_be_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, ssd_dispatch="fused")
    text = run(capsys, "--config", str(config), code=1)
    assert "[mend] model.ssd_dispatch is fused, which cannot run here: the tensors" in text
    # The seeds' path falls back by contract.
    config = write_run(tmp_path, ssd_dispatch="triton")
    assert "Pytorch would run in its place" in flat(run(capsys, "--config", str(config)))


def test_a_wrong_configuration_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--config", "configs/none.yaml"])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.startswith("error: ") and len(captured.err.splitlines()) == 1


def fake_tool(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``nvidia-smi`` that does as it is told, before any other."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_gpu_that_torch_cannot_use_has_to_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tool(tmp_path, "echo NVIDIA H200, 570.1", monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    problem = problem_of(doctor._gpus(False, []), "GPU")
    assert problem == "this torch cannot use the NVIDIA H200: install a CUDA build"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    problem = problem_of(doctor._gpus(False, []), "GPU")
    assert problem is not None and "CUDA_VISIBLE_DEVICES" in problem
    fake_tool(tmp_path, "exit 9", monkeypatch)
    assert problem_of(doctor._gpus(False, []), "GPU") is None


def test_what_cuda_complains_about_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_driver() -> bool:
        warnings.warn("CUDA initialization: the driver is too old (found 11040)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    problem = problem_of(doctor.examine(), "GPU")
    assert problem is not None and "the driver is too old (found 11040)" in problem


def test_a_gpu_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, "echo NVIDIA H200, 570.1", monkeypatch)
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, 140 * 2**30))
    texts = {f.topic: f.text for f in doctor._gpus(True, [])}
    assert "140.0 GiB (1.0 free), compute capability 9.0" in texts["GPU 0"]
    assert "989 TFLOP/s" in texts["GPU 0"] and texts["driver"] == "570.1"
    # 42 GiB are predicted for this run.
    fast = TrainingConfig(grad_checkpoint=False, model_config={"ssd_dispatch": "fused"})
    (data, memory) = doctor._run(fast, CUDA)
    assert memory.problem is None and memory.text.startswith("42.1 GiB predicted of 140.0")
    gpu.total_memory = 40 * 2**30
    assert "does not fit the GPU" in str(problem_of(doctor._run(fast, CUDA), "memory"))


def test_on_a_gpu_triton_needs_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._triton(CPU).problem is None
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    spec = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec("json"))
    assert doctor._triton(CUDA).problem == "Triton finds no C compiler: install gcc"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert "no Python headers" in str(doctor._triton(CUDA).problem)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "needs Triton" in str(doctor._compile(CUDA, None).problem)
    assert doctor._compile(CUDA, TrainingConfig(compile_model=False)).problem is None


def test_the_gate_of_the_seeds_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.ssd_backends, "BACKENDS", {
        "triton": ssd_backends.Backend("triton", "none:none", lambda shape: None)
    })  # fmt: skip
    monkeypatch.setattr(ssd_backends, "resolve", lambda *a: SimpleNamespace(name="triton"))
    monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
    told = next(doctor._paths(ModelConfig(), CPU, None))
    assert "only with ENABLE_TRITON_KERNELS=1" in told.text and told.problem is None
    monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
    assert next(doctor._paths(ModelConfig(), CPU, None)).text == "runs on cpu"


def test_the_place_of_the_plans_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path / "cache"))
    assert doctor._plan_cache().text.startswith(f"0 remembered in {tmp_path / 'cache'}")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fused_plans.json").write_text('{"a GPU": 0}')
    assert doctor._plan_cache().text.startswith("1 remembered")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "cannot be written" in doctor._plan_cache().text

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert "no home directory" in doctor._plan_cache().text


def test_old_versions_and_wrong_variables_have_to_be_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor._python().problem is None and doctor._torch().problem is None
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    assert "2.11 or newer" in str(doctor._torch().problem)
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 1))
    assert "3.11 or newer" in str(doctor._python().problem)
    assert doctor._environment().problem is None
    monkeypatch.setenv("TRITON_PER_CHUNK_NUM_WARPS", "many")
    found = doctor._environment()
    assert "NUM_WARPS='many' is not an integer" in str(found.problem)
    assert "TRITON_PER_CHUNK_NUM_WARPS=many" in found.text


def test_every_extra_of_the_package_is_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert doctor.EXTRAS.keys() == extras.keys() - {"all", "test", "interp"}
    for extra, (module, _) in doctor.EXTRAS.items():
        brought = re.match(r"[\w-]+", extras[extra][0])
        assert brought is not None and brought[0].replace("-", "_") == module
    assert project["requires-python"] == f">={'.'.join(map(str, doctor.OLDEST_PYTHON))}"
    assert f"torch>={'.'.join(map(str, doctor.OLDEST_TORCH))}" in project["dependencies"]
    assert {v.name for v in env.VARIABLES} >= {"TRITON_PER_CHUNK_NUM_STAGES"}
