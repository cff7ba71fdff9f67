"""The seeds' dispatch contract around the per-chunk Triton path, on a machine without CUDA.

The kernel itself is tested in tests/interp (interpreted, launch count above zero) and tests/gpu (on
a device).
"""

import pytest
import torch

from mamba3_lite.models import ssd_triton
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.pretrain import _enforce_triton_env_var

FIELDS = dict(d_model=32, n_heads=2, head_dim=16, state_dim=16, ffn_dim=64, chunk_size=16)


def block(dispatch: str, layer_idx: int = 0, **changes) -> Mamba3Block:
    torch.manual_seed(0)
    return Mamba3Block({**FIELDS, "ssd_dispatch": dispatch, **changes}, layer_idx)


class TestPerChunkSsdDispatchWiring:
    def test_default_dispatch_is_pytorch(self, capsys):
        assert ModelConfig().ssd_dispatch == "pytorch"
        default = Mamba3Block(FIELDS)
        assert default.ssd_dispatch == "pytorch"
        before = ssd_triton.launch_count()
        default(torch.randn(1, 20, 32))
        assert ssd_triton.launch_count() == before and capsys.readouterr().out == ""

    def test_explicit_triton_dispatch_falls_back_cleanly_on_cpu(self, capsys):
        x = torch.randn(2, 40, 32)
        y = block("triton", layer_idx=5)(x)
        said = capsys.readouterr().out
        assert said.startswith("[Mamba3Block 5] ssd_dispatch='triton' unavailable (")
        assert said.endswith("); falling back to 'pytorch' for this block.\n")
        assert torch.equal(y, block("pytorch")(x))

    @pytest.mark.parametrize(
        "changes", [{"state_dim": 512}, {"state_dim": 24}, {"chunk_size": 300}]
    )
    def test_a_dimension_the_kernel_cannot_take_falls_back_too(self, capsys, changes):
        x = torch.randn(1, 20, 32)
        y = block("triton", **changes)(x)
        assert "unavailable" in capsys.readouterr().out
        assert torch.equal(y, block("pytorch", **changes)(x))

    def test_triton_fallback_warning_is_one_shot_per_instance(self, capsys):
        more = {"vocab_size": 50, "n_layers": 3, "ssd_dispatch": "triton"}
        model = Mamba3Transformer({**FIELDS, **more})
        assert not any(layer._triton_fallback_warned for layer in model.layers)
        for _ in range(3):
            model(torch.randint(0, 50, (1, 20)))
        lines = capsys.readouterr().out.strip().splitlines()
        assert [line.split("]")[0] for line in lines] == [f"[Mamba3Block {i}" for i in range(3)]
        assert all(layer._triton_fallback_warned for layer in model.layers)

    def test_triton_path_output_matches_pytorch_path(self):
        """Falls back on a CPU; its companions in tests/interp and tests/gpu count launches."""
        x = torch.randn(2, 50, 32, requires_grad=True)
        outputs = []
        for dispatch in ("pytorch", "triton"):
            layer = block(dispatch)
            y = layer(x)
            grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
            outputs.append([y, *grads])
        for got, want in zip(outputs[1], outputs[0], strict=True):
            assert float((got - want).norm()) <= 1e-5 * float(want.norm())

    def test_a_crash_inside_the_kernel_surfaces(self, monkeypatch):
        """Only a foreseeable refusal falls back; a kernel that fails is a bug to be seen."""

        def crash(*args, **kwargs):
            raise RuntimeError("kernel bug")

        monkeypatch.setattr(ssd_triton, "refuse", lambda **shape: None)
        monkeypatch.setattr(ssd_triton, "per_chunk_ssd_triton", crash)
        with pytest.raises(RuntimeError, match="kernel bug"):
            block("triton")(torch.randn(1, 20, 32))

    def test_an_unknown_name_runs_pytorch_at_this_level(self):
        x = torch.randn(1, 20, 32)
        assert torch.equal(block("nonsense")(x), block("pytorch")(x))


class TestEnableTritonKernelsForceBack:
    def test_triton_dispatch_forced_back_when_env_var_missing(self, monkeypatch):
        monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
        config, lines = {"ssd_dispatch": "triton"}, []
        _enforce_triton_env_var(config, lines.append)
        assert config == {"ssd_dispatch": "pytorch"}
        (line,) = lines
        assert line.startswith("[warn]") and "ENABLE_TRITON_KERNELS=1" in line

    def test_triton_dispatch_passes_through_when_env_var_set(self, monkeypatch):
        monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
        config, lines = {"ssd_dispatch": "triton"}, []
        _enforce_triton_env_var(config, lines.append)
        assert config == {"ssd_dispatch": "triton"} and lines == []

    @pytest.mark.parametrize("name", ["pytorch", "rotated", "auto"])
    def test_other_names_do_not_need_the_variable(self, monkeypatch, name):
        monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
        config, lines = {"ssd_dispatch": name}, []
        _enforce_triton_env_var(config, lines.append)
        assert config == {"ssd_dispatch": name} and lines == []


class TestPerChunkSsdImportSurface:
    @pytest.mark.parametrize(
        ("dims", "name"),
        [((512, 64, 64), "P"), ((64, 257, 64), "N"), ((64, 64, 512), "chunk_size")],
    )
    def test_check_block_dims_raises_value_error_on_too_large_dim(self, dims, name):
        with pytest.raises(ValueError, match=f"{name}={max(dims)}"):
            ssd_triton._check_block_dims(*dims)

    def test_check_block_dims_accepts_production_404m_shape(self):
        assert ssd_triton._check_block_dims(64, 64, 64) is None
        assert ssd_triton._check_block_dims(256, 256, 256) is None
        assert ssd_triton._MAX_BLOCK == 256

    def test_view_real_imag_wants_complex64(self):
        t = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
        real, imag = ssd_triton._view_real_imag(t)
        assert torch.equal(real, t.real) and torch.equal(imag, t.imag)
        assert real.is_contiguous() and imag.is_contiguous()
        for wrong in (t.real, t.to(torch.complex128)):
            with pytest.raises(TypeError):
                ssd_triton._view_real_imag(wrong)

    def test_without_triton_the_function_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
        with pytest.raises(ImportError, match="riton"):
            ssd_triton.per_chunk_ssd_triton(*[torch.zeros(1)] * 5)
