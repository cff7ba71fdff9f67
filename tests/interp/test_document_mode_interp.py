"""Document mode on the SSD kernels, interpreted: the checks of ``tests/test_document_mode.py``.

As with the per-chunk kernel, they need a process of their own: started plainly, this file runs
itself once more with TRITON_INTERPRET=1.
"""

from pathlib import Path

import pytest

from mamba3_lite import env
from mamba3_lite.models import ssd_triton
from mamba3_lite.models.ssd_backends import BACKENDS
from tests import test_document_mode as document_mode
from tests.interp.again import start_again

pytestmark = pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
KERNELS = [name for name in BACKENDS if name not in document_mode.PATHS]

if env.read("TRITON_INTERPRET") == "1":

    @pytest.mark.parametrize("path", KERNELS)
    def test_a10_packed_documents_train_as_if_alone(path: str, tmp_path: Path) -> None:
        # case A10
        document_mode.assert_packed_documents_train_as_if_alone(path, tmp_path)

    @pytest.mark.parametrize("path", KERNELS)
    def test_a10_editing_a_document_changes_nothing_in_the_next(path: str, tmp_path: Path) -> None:
        # case A10
        document_mode.assert_an_edit_stays_in_its_document(path, tmp_path)

else:

    def test_document_mode_under_the_interpreter():
        assert start_again(__file__) == 2 * len(KERNELS)
