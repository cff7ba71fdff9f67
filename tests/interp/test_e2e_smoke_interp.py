"""Keeps ``tests/e2e_gpu_smoke.py`` working where there is no GPU: a small shape, interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mamba3_lite.models import ssd_triton

TESTS = Path(__file__).resolve().parents[1]
# Check 1 is about the GPU itself.
ON_THE_CPU = """
import sys, torch, e2e_gpu_smoke as smoke
smoke.DEVICE, smoke.SEQ_LEN = torch.device("cpu"), 40
smoke.SHAPE |= {"head_dim": 16, "state_dim": 16, "chunk_size": 16}
sys.exit(not all([smoke.run_check(number) for number in range(2, 9)]))
"""


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS), **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
def test_checks_2_to_8_pass_interpreted():
    done = run_python("-c", ON_THE_CPU, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"[{n}/8] PASS" in done.stdout for n in range(2, 9)] == [True] * 7


@pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
def test_a_failing_check_is_reported_and_counts():
    broken = "smoke._relative_error = lambda got, want: 1.0\nsys.exit(not smoke.run_check(5))"
    lines = ON_THE_CPU.splitlines()
    script = "\n".join([*lines[:-1], broken])
    done = run_python("-c", script, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "[5/8] FAIL" in done.stdout and "outputs differ" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_one_line_says_so():
    done = run_python(str(TESTS / "e2e_gpu_smoke.py"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "needs a CUDA device" in done.stderr
