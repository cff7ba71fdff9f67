"""Device names, stated peaks and the environment record."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from mamba3_lite import hardware


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("Intel(R) Xeon(R) Processor", None),
        ("", None),
    ],
)
def test_peaks_are_those_of_the_very_product(name: str, peak: float | None) -> None:
    assert hardware.peak_bf16_flops(name) == peak


def test_the_record_is_json_and_names_what_a_number_depends_on() -> None:
    record = hardware.environment_record()
    assert json.loads(json.dumps(record)) == record
    assert record["torch"] == torch.__version__ and record["cuda"] == torch.version.cuda
    assert record["cpu"] == {"model": hardware.device_name("cpu"), "count": os.cpu_count()}
    assert record["cpu"]["model"]
    assert len(record["gpus"]) == torch.cuda.device_count()
    expected = {"python", "platform", "torch", "triton", "cuda", "package", "gpus", "cpu", "git"}
    assert record.keys() == expected


def test_git_state_is_told_only_for_a_checkout_of_the_project_itself(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert hardware._git_state(tmp_path) is None
    git("init")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "x")
    commit = git("rev-parse", "HEAD")
    assert hardware._git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "file").write_text("2")
    assert hardware._git_state(tmp_path) == {"commit": commit, "dirty": True}
    assert hardware._git_state(tmp_path / "site-packages") is None


def test_without_git_the_record_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.environment_record()["git"] is None


def test_peak_memory_of_the_process_counts_bytes() -> None:
    before = hardware.peak_memory_bytes("cpu")
    block = torch.ones(2**28, dtype=torch.uint8)
    after = hardware.peak_memory_bytes("cpu")
    assert block.numel() == 2**28
    assert after >= 2**28 and after >= before
    assert after < 2**45  # KiB taken for bytes twice would be beyond any machine


@pytest.mark.gpu
def test_a_cuda_device_has_a_name_and_a_peak_memory() -> None:
    assert hardware.device_name("cuda") == torch.cuda.get_device_name()
    torch.cuda.reset_peak_memory_stats()
    block = torch.ones(2**20, dtype=torch.uint8, device="cuda")
    assert hardware.peak_memory_bytes("cuda") >= block.nbytes
    assert hardware.environment_record()["gpus"][0]["memory_bytes"] > 2**30
