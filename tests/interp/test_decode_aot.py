"""Without a GPU: every launch of a decoding step compiles for A100 and H200, and fits them."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mamba3_lite import env
from mamba3_lite.inference import decode_resident, decode_weights
from mamba3_lite.inference.decode_plans import BATCH_PLANS, SMALL_PLAN, VECTOR_PLANS, Plan
from mamba3_lite.inference.decode_staged import fits, ops_for
from mamba3_lite.inference.decode_step import run_steps
from mamba3_lite.models import ssd_triton
from mamba3_lite.models.transformer import ModelConfig
from tests import decode_checks
from tests.decode_checks import KERNELS, RESIDENT_MODEL, RESIDENT_SHAPES, STAGED_KERNELS
from tests.fused_checks import Launch, _Watched
from tests.interp.test_fused_aot import assert_fits, distinct
from tests.interp.test_per_chunk_aot import SHARED_LIMIT_BYTES, resource_usage, stack_bytes

pytestmark = pytest.mark.skipif(
    not ssd_triton.HAS_TRITON or env.read("TRITON_INTERPRET") == "1",
    reason="needs Triton, compiling and not interpreting",
)
PRODUCTION = ModelConfig(n_layers=1)
NEWEST, OLDEST = 90, 80


def launches(
    plan: Plan, cfg: ModelConfig, batch: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> list[Launch]:
    """What one step of a model would launch; nothing runs, and nothing has memory."""
    from mamba3_lite.kernels import decode, decode_staged

    found: list[Launch] = []
    buffers = decode_weights.make_buffers(cfg, batch, dtype, state_dtype, torch.device("meta"))
    width = cfg.n_heads * cfg.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    projected = buffers.proj.shape[1]
    layer = decode_weights.LayerWeights(
        norm1=empty(cfg.d_model), in_proj=empty(projected, cfg.d_model),
        a=torch.empty(2, cfg.n_heads, device="meta"), mixer=empty(cfg.d_model, width),
        norm2=empty(cfg.d_model), gate_up=empty(2 * cfg.ffn_dim, cfg.d_model),
        down=empty(cfg.d_model, cfg.ffn_dim),
    )  # fmt: skip
    embed = empty(cfg.vocab_size, cfg.d_model)
    weights = decode_weights.Weights(embed, [layer], empty(cfg.d_model), embed, 1e-5)
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(decode, name, _Watched(getattr(decode, name), found, False))
        for name in STAGED_KERNELS:
            watched = _Watched(getattr(decode_staged, name), found, False)
            patch.setattr(decode_staged, name, watched)
        run_steps(ops_for(plan), weights, buffers, 1)
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def supported(plan: Plan, arch: int) -> Plan:
    return plan if arch >= NEWEST else plan._replace(pdl=False, staged=False)


def usable(plan: Plan, cfg: ModelConfig, batch: int, dtype: torch.dtype) -> bool:
    """As the decoder chooses."""
    return not plan.staged or (dtype != torch.float32 and fits(cfg, batch))


@pytest.mark.parametrize("arch", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    "batch, plan",
    [(1, VECTOR_PLANS[1]), (1, VECTOR_PLANS[2]), (64, BATCH_PLANS[0]), (64, BATCH_PLANS[2])],
)
def test_a_step_compiles_and_fits(batch, plan, arch, tmp_path):
    plan = supported(plan, arch)
    found = launches(plan, PRODUCTION, batch, torch.bfloat16, torch.float32)
    # Of a batch the head looks for its largest logits by itself, and staged kernels need no norms.
    extra = 1 if batch == 1 else 0 if plan.staged else 3
    assert len(found) == 8 + extra, "five a layer, embedding, head, the best id; searches and norms"
    for launch in distinct(found):
        compiled = assert_fits(launch, arch)
        stack = stack_bytes(compiled.asm["cubin"], tmp_path / "kernel.cubin")
        assert stack <= 256, (launch.kernel.__name__, stack)
        code = compiled.asm["ptx"]
        assert ("griddepcontrol" in code) is plan.pdl
        name = launch.kernel.__name__
        if name in ("vector_kernel", "ssd_step_kernel") and plan.pdl:
            early, late = code.split("griddepcontrol.wait")
            # Weights and state are under way before the wait, and nothing else is.
            assert "griddepcontrol.launch_dependents" in early
            assert len(re.findall(r"ld\.global", early)) >= 2
            assert "ld.global" in late and "st.global" not in early
            assert re.findall(r"ld\.global\S*\.v4", early)
        elif name in STAGED_KERNELS:
            early, late = code.split("griddepcontrol.wait")
            assert "cp.async" in early and "st.global" not in early
            assert ("wgmma" in late) is (name in ("staged_batch_kernel", "staged_head_kernel"))
        elif name == "batch_kernel" and plan.pdl:
            early = code.split("griddepcontrol.wait")[0]
            assert "prefetch.global.L2" in early and "ld.global" not in early
            assert "cp.async" not in early


@pytest.mark.campaign
@pytest.mark.parametrize("arch", [OLDEST, NEWEST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_campaign_every_launch_compiles_and_fits(dtype, arch):
    odd = ModelConfig(
        vocab_size=1009, d_model=100, n_layers=1, n_heads=3, head_dim=40, state_dim=100, ffn_dim=300
    )
    wide = ModelConfig(n_layers=1, n_heads=8, head_dim=256, state_dim=256, ffn_dim=8192)
    every = []
    for cfg in (PRODUCTION, odd, wide):
        for batch in (1, 2, 64):
            for state in (torch.float32, torch.bfloat16):
                narrow = VECTOR_PLANS[1:] if batch == 1 else BATCH_PLANS
                plans = (SMALL_PLAN, *(() if dtype == torch.float32 and batch > 1 else narrow))
                for plan in (supported(plan, arch) for plan in plans):
                    if usable(plan, cfg, batch, dtype):
                        every += launches(plan, cfg, batch, dtype, state)
    for launch in distinct(every):
        assert_fits(launch, arch)


def resident(
    state_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.bfloat16, batch: int = 1,
    processors: int = 132, **changes: Any,
) -> tuple[decode_resident.Cut | None, list[str]]:  # fmt: skip
    """How a model is shared out on an H200, and what the kernel is compiled with for it."""
    model = decode_checks.model("cpu", **{**RESIDENT_MODEL, **changes})
    weights = decode_weights.prepare(model, dtype)
    buffers = decode_weights.make_buffers(model.cfg, batch, dtype, state_dtype, torch.device("cpu"))
    found = decode_resident.cut(weights, buffers, processors)
    return found, decode_resident.macros(weights, buffers, found) if found else []


@pytest.mark.skipif(find_spec("cuda") is None, reason="needs the bindings of CUDA, and NVRTC")
@pytest.mark.parametrize("shape", RESIDENT_SHAPES)
def test_the_resident_kernel_compiles_and_fits(shape, tmp_path):
    source = decode_resident.SOURCE.read_text()
    for state_dtype in (torch.float32, torch.bfloat16):
        found, options = resident(state_dtype, **RESIDENT_SHAPES[shape])
        if found is None:
            assert shape == "wide state" and state_dtype == torch.bfloat16
            continue
        code = decode_resident.compile_source(source, options)
        usage = resource_usage(code, tmp_path / "kernel.cubin")
        assert usage["STACK"] <= 64, usage
        assert usage["SHARED"] + found.ring_bytes <= SHARED_LIMIT_BYTES[NEWEST]
        # All programs at once on an H200, and each has rows of in_proj.
        assert 66 < found.programs <= 132


def test_models_and_gpus_that_the_resident_kernel_leaves_alone():
    production = {**RESIDENT_SHAPES["production"], "vocab_size": 5003, "n_layers": 1}
    assert resident(**production)[0] == (1024, 132, 100)
    for changes in (
        {"batch": 2}, {"dtype": torch.float32}, {"dtype": torch.float16},
        {"state_dtype": torch.float16}, {"head_dim": 32, "n_heads": 32, "ffn_dim": 256},
        {"d_model": 1000}, {"n_heads": 17},
        {"ffn_dim": 8192}, {"state_dim": 48}, {"state_dim": 256}, {"head_dim": 4},
        {"processors": 66},
    ):  # fmt: skip
        assert resident(**{**production, **changes})[0] is None, changes


def test_weights_that_a_copy_engine_cannot_read_are_left_to_others():
    model = decode_checks.model("cpu", torch.bfloat16, **RESIDENT_MODEL)
    weights = decode_weights.prepare(model, torch.bfloat16)
    buffers = decode_weights.make_buffers(
        model.cfg, 1, torch.bfloat16, torch.float32, torch.device("cpu")
    )
    assert decode_resident.cut(weights, buffers, 132) is not None
    room = torch.empty(weights.norm_f.numel() + 1, dtype=torch.bfloat16)
    assert decode_resident.cut(weights._replace(norm_f=room[1:]), buffers, 132) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no driver to load")
def test_a_driver_that_is_missing_is_a_reason_and_no_crash(tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path))
    _, options = resident()
    with pytest.raises(decode_resident.ResidentError, match="."):
        decode_resident._load(decode_resident.SOURCE.read_text(), tuple(options))
