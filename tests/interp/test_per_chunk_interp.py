"""The per-chunk kernel on a machine without a GPU: interpreted, and compiled ahead of time.

Triton decides when the kernel is imported whether it interprets, so the checks need a process of
their own: started plainly, this file runs itself once more with TRITON_INTERPRET=1.
"""

import pytest
import torch

from mamba3_lite import env
from mamba3_lite.models import ssd_triton
from tests.interp.again import start_again
from tests.per_chunk_checks import CASES, PerChunkChecks

pytestmark = pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
INTERPRETED = ssd_triton.HAS_TRITON and env.read("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import triton
    import triton.language as tl

    from mamba3_lite.kernels.per_chunk import token_rows

    class TestInterpreted(PerChunkChecks):
        device = "cpu"

    @triton.jit
    def _row_offsets(out, program, H, C: tl.constexpr, WIDTH: tl.constexpr):
        tokens = tl.arange(0, C)
        tl.store(out + tokens, token_rows(program, H, C, tokens) * WIDTH)

    def test_offsets_stay_right_beyond_32_bits():
        program, heads, chunk, width = 2**31 - 5, 16, 64, 128
        out = torch.empty(chunk, dtype=torch.int64)
        _row_offsets[(1,)](out, program, heads, C=chunk, WIDTH=width)
        first = program // heads * chunk
        want = [((first + t) * heads + program % heads) * width for t in range(chunk)]
        assert want[0] > 2**43
        assert out.tolist() == want

else:

    def test_every_check_passes_under_the_interpreter():
        assert start_again(__file__) > len(CASES)
