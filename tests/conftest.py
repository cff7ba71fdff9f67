"""What holds for every test: a clean environment, fixed seeds, no GPU test without CUDA."""

import random

import numpy as np
import pytest
import torch

from mamba3_lite import env

# TRITON_INTERPRET is how a whole run is switched to interpreted kernels, so it has to get through.
LEAKY_VARIABLES = [v.name for v in env.VARIABLES if v.name not in ("TRITON_INTERPRET", "CC")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_cuda = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_cuda)


@pytest.fixture(autouse=True)
def same_start_for_every_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in LEAKY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # What one test measures may serve the next, but nothing of the user's.
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
