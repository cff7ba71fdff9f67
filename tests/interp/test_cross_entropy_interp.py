"""The cross-entropy kernel on a machine without a GPU: interpreted, and compiled ahead of time.

As with the per-chunk kernel, the interpreted checks need a process of their own: started plainly,
this file runs itself once more with TRITON_INTERPRET=1.
"""

import re

import pytest

from mamba3_lite import env
from mamba3_lite.models import ssd_triton
from tests.cross_entropy_checks import CrossEntropyChecks
from tests.interp.again import start_again

pytestmark = pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton")
INTERPRETED = ssd_triton.HAS_TRITON and env.read("TRITON_INTERPRET") == "1"

if INTERPRETED:

    class TestInterpreted(CrossEntropyChecks):
        device = "cpu"

else:

    def test_every_check_passes_under_the_interpreter():
        assert start_again(__file__) > 20

    @pytest.mark.parametrize("arch", [80, 90])
    @pytest.mark.parametrize("write_gradient", [True, False])
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_kernel_compiles_with_wide_accesses(arch, dtype, write_gradient, tmp_path, monkeypatch):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from mamba3_lite.kernels import cross_entropy

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        constants = {
            "IGNORE_INDEX": -100,
            "WRITE_GRADIENT": write_gradient,
            "BLOCK": cross_entropy.BLOCK,
        }
        signature = {"logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32"}
        signature |= {"vocab": "i32", "width": "i32"} | dict.fromkeys(constants, "constexpr")
        assert list(signature) == cross_entropy.cross_entropy_kernel.arg_names
        # What a launch sees as well: aligned tensors and a padded width; the vocabulary is odd.
        aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 4)}
        source = ASTSource(cross_entropy.cross_entropy_kernel, signature, constants, aligned)
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": cross_entropy.WARPS},
        )
        ptx = compiled.asm["ptx"]
        # The row is read and written 16 bytes at a time although the vocabulary is odd; only the
        # target and its logit are single reads, only the loss is a single write.
        passes = 1 + write_gradient
        per_pass = cross_entropy.BLOCK // (32 * cross_entropy.WARPS) * int(dtype[2:]) // 128
        accesses = re.findall(r"(ld|st)\.global(\.v4)?\.b\d+", ptx)
        assert accesses.count(("ld", ".v4")) == passes * per_pass
        assert accesses.count(("st", ".v4")) == write_gradient * per_pass
        assert accesses.count(("ld", "")) == 2 and accesses.count(("st", "")) == 1
        # Gradients are rounded to nearest: cut off, p - 1 would be 0.4 % short where p is small.
        assert ("cvt.rn.bf16" in ptx) is (dtype == "bf16" and write_gradient)
