"""Without a GPU: the per-chunk kernel compiles to machine code for A100 and H200, and fits them."""

import re
import subprocess

import pytest

from mamba3_lite import env
from mamba3_lite.models import ssd_triton

pytestmark = pytest.mark.skipif(
    not ssd_triton.HAS_TRITON or env.read("TRITON_INTERPRET") == "1",
    reason="needs Triton, compiling and not interpreting",
)

KIB = 1024
SHARED_LIMIT_BYTES = {80: 163 * KIB, 90: 227 * KIB}
# The production shape both ways, and the largest and smallest of everything else.
CONFIGURATIONS = [
    (64, 64, 64, False, False),
    (64, 64, 64, False, True),
    (256, 256, 256, True, True),
    (1, 1, 1, True, False),
]


def compile_kernel(arch: int, chunk, state_dim, head_dim, complex_x, has_segments):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mamba3_lite.kernels.per_chunk import per_chunk_kernel

    constants = ssd_triton._kernel_options(
        chunk, state_dim, head_dim, complex_x=complex_x, has_segments=has_segments
    )
    constants |= {} if complex_x else {"x_im": None}
    constants |= {} if has_segments else {"segments": None}
    types = {"segments": "*i64", "H": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp32") for name in per_chunk_kernel.arg_names}
    options = {
        "num_warps": env.read_int("TRITON_PER_CHUNK_NUM_WARPS"),
        "num_stages": env.read_int("TRITON_PER_CHUNK_NUM_STAGES"),
    }
    # What a launch sees as well: every tensor starts at a multiple of 16 bytes.
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(per_chunk_kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resource_usage(cubin: bytes, path) -> dict[str, int]:
    """What a kernel takes: REG, STACK, SHARED and so on."""
    from triton import knobs

    path.write_bytes(cubin)
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {name: int(count) for name, count in re.findall(r"([A-Z]+):(\d+)", usage)}


def stack_bytes(cubin: bytes, path) -> int:
    """Local memory of a thread: what did not fit its registers."""
    return resource_usage(cubin, path)["STACK"]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: "-".join(map(str, c)))
def test_configuration_compiles_and_fits(arch, configuration, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernel(arch, *configuration)
    assert compiled.metadata.shared <= SHARED_LIMIT_BYTES[arch]
    # A sine and a cosine take 32 bytes; thousands would mean that the tiles outgrew the registers.
    assert stack_bytes(compiled.asm["cubin"], tmp_path / "kernel.cubin") <= 256
