"""Document mode on a CUDA device, by every SSD path that runs there."""

from pathlib import Path

import pytest
import torch

from mamba3_lite.models.ssd_backends import BACKENDS
from tests import test_document_mode as document_mode

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(params=BACKENDS)
def path(request: pytest.FixtureRequest) -> str:
    if reason := document_mode.refusal(request.param, CUDA):
        pytest.skip(reason)
    return request.param


def test_a10_packed_documents_train_as_if_alone(path: str, tmp_path: Path) -> None:
    # case A10
    document_mode.assert_packed_documents_train_as_if_alone(path, tmp_path, device=CUDA)


def test_a10_editing_a_document_changes_nothing_in_the_next(path: str, tmp_path: Path) -> None:
    # case A10
    document_mode.assert_an_edit_stays_in_its_document(path, tmp_path, CUDA)
