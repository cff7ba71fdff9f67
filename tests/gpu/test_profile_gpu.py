"""pretrain --profile on a GPU: the trace holds its kernels, the table is by its time."""

import gzip
import json
from pathlib import Path

import pytest

from mamba3_lite.training.profile import OPERATORS, TRACE
from tests.runs import Pretrainer, config

pytestmark = pytest.mark.gpu


def test_a_profile_holds_the_kernels(tmp_path: Path) -> None:
    assert Pretrainer(config(tmp_path, max_steps=5), profile=True).train() == 0
    folder = tmp_path / "run" / "profile"
    with gzip.open(folder / TRACE) as file:
        kernels = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "kernel"]
    assert len(kernels) > 100 and all(event["dur"] >= 0 for event in kernels)
    assert "Self CUDA time total" in (folder / OPERATORS).read_text()
