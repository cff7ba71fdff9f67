"""Checks of the per-chunk Triton kernel, shared by the interpreted run and the run on CUDA.

The reference is ``per_chunk_ssd_pytorch`` in complex128 on the CPU, from the same rounded inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mamba3_lite.errors import UserError
from mamba3_lite.models import ssd_triton
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.ssd_complex import per_chunk_ssd_pytorch, prefix_decay

NAMES = ("Bc", "Cc", "Xc", "A_log", "decay_states")
# Relative L2. Outputs are the kernel's, gradients those of the float32 recompute.
TOLERANCE = dict.fromkeys(("y", "state", *NAMES), 2e-6) | {"A_log": 5e-6}
# Long chunks cost the interpreter seconds, so they get the two extreme kinds of input only.
KINDS = [(False, False), (True, False), (False, True), (True, True)]
CASES = [
    (chunk, state_dim, head_dim, complex_x, with_segments)
    for chunk in (16, 64, 128)
    for state_dim in (16, 64)
    for head_dim in (16, 64)
    for complex_x, with_segments in (KINDS if chunk < 128 else (KINDS[0], KINDS[3]))
]


@dataclass
class Inputs:
    """One call: the five differentiable tensors in the order of NAMES, and the document ids."""

    tensors: list[Tensor]
    segments: Tensor | None

    def in_float64(self) -> "Inputs":
        wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in self.tensors]
        return Inputs(wide, self.segments)


def make_inputs(
    chunk: int,
    state_dim: int,
    head_dim: int,
    *,
    complex_x: bool = False,
    with_segments: bool = False,
    batch: int = 1,
    log_decay_scale: float = -1.0,
) -> Inputs:
    """Two chunks and two heads, with the decays that the chunkwise path would make."""
    generator = torch.Generator().manual_seed(chunk + state_dim + head_dim)

    def draw(*shape: int, dtype: torch.dtype = torch.complex64) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    shape = (batch, 2, chunk, 2)
    s = torch.nn.functional.softplus(draw(batch, 2 * chunk, 2, dtype=torch.float64))
    real = torch.tensor([1.0, 0.02], dtype=torch.float64) * log_decay_scale
    log_decay, phase = prefix_decay(real, torch.tensor([0.5, 3.14]), s, chunk)
    to_end, segments = log_decay[:, :, -1:] - log_decay, None
    if with_segments:
        # Documents end inside the first chunk, with it, and inside the second one.
        starts = torch.tensor([chunk // 3, chunk, chunk + chunk // 2 + 1])
        ids = torch.bucketize(torch.arange(2 * chunk), starts, right=True)
        segments = ids.expand(batch, -1).unflatten(1, (2, chunk))
        to_end = to_end.masked_fill((segments != segments[..., -1:])[..., None], -torch.inf)
    tensors = [
        draw(*shape, state_dim),
        draw(*shape, state_dim),
        draw(*shape, head_dim, dtype=torch.complex64 if complex_x else torch.float32),
        torch.complex(log_decay, phase).to(torch.complex64),
        torch.polar(torch.exp(to_end), phase[:, :, -1:] - phase).to(torch.complex64),
    ]
    return Inputs(tensors, segments)


def results(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, device: str
) -> dict[str, Tensor]:
    """Both outputs, and the gradient of one fixed function of them for every input."""
    leaves = [t.detach().to(device).requires_grad_() for t in inputs.tensors]
    segments = None if inputs.segments is None else inputs.segments.to(device)
    outputs = function(*leaves, segments)
    generator = torch.Generator().manual_seed(1)
    seeds = [
        torch.randn(
            t.shape, dtype=torch.complex64 if t.is_complex() else torch.float32, generator=generator
        )
        for t in outputs
    ]
    grads = torch.autograd.grad(
        outputs, leaves, [g.to(t) for g, t in zip(seeds, outputs, strict=True)]
    )
    values = (t.detach() for t in (*outputs, *grads))
    return dict(zip(("y", "state", *NAMES), values, strict=True))


def assert_parity(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Every result within its tolerance; a failure lists all errors, which shows the pattern."""
    # With one token a chunk, the gradient of A_log is 0: its error is then an absolute one.
    errors = {
        name: float((got[name].cpu() - want[name]).norm() / (want[name].norm() or 1.0))
        for name in want
    }
    assert all(errors[name] <= TOLERANCE[name] for name in want), errors


def launches_during(call: Callable[[], object]) -> int:
    before = ssd_triton.launch_count()
    call()
    return ssd_triton.launch_count() - before


class PerChunkChecks:
    """A subclass names the device; on "cpu" the process must run with TRITON_INTERPRET=1."""

    device: str

    def kernel_results(self, inputs: Inputs) -> dict[str, Tensor]:
        return results(ssd_triton.per_chunk_ssd_triton, inputs, self.device)

    def reference(self, inputs: Inputs) -> dict[str, Tensor]:
        return results(per_chunk_ssd_pytorch, inputs.in_float64(), "cpu")

    @pytest.mark.parametrize(
        "chunk, state_dim, head_dim, complex_x, with_segments", CASES, ids=lambda v: str(int(v))
    )
    def test_outputs_and_gradients_equal_the_float64_reference(
        self, chunk, state_dim, head_dim, complex_x, with_segments
    ):
        inputs = make_inputs(
            chunk, state_dim, head_dim, complex_x=complex_x, with_segments=with_segments
        )
        assert_parity(self.kernel_results(inputs), self.reference(inputs))

    @pytest.mark.parametrize("dims", [(1, 1, 1), (2, 8, 4), (4, 1, 32), (8, 2, 256), (256, 32, 2)])
    def test_dimensions_below_and_above_a_tile(self, dims):
        inputs = make_inputs(*dims, complex_x=True, with_segments=dims[0] > 2)
        assert_parity(self.kernel_results(inputs), self.reference(inputs))

    def test_a_planted_fault_breaks_the_parity(self):
        inputs = make_inputs(64, 16, 16, with_segments=True)
        got, want = self.kernel_results(inputs), self.reference(inputs)
        assert_parity(got, want)
        b, c, x, a_log, decay = inputs.tensors
        without_phase = [b, c, x, torch.complex(a_log.real, 0 * a_log.real), decay]
        faults = [
            self.reference(Inputs(without_phase, inputs.segments)),
            self.reference(Inputs(inputs.tensors, None)),
            self.reference(Inputs([b, c.conj(), x, a_log, decay], inputs.segments)),
            want | {"state": 1.03 * want["state"]},
            want | {"A_log": 1.03 * want["A_log"]},
        ]
        for fault in faults:
            with pytest.raises(AssertionError):
                assert_parity(got, fault)

    def test_nothing_above_the_diagonal_or_of_another_document_leaks(self):
        """Masked exponents up to e^2000; what they belong to must weigh 0, not inf * 0."""
        inputs = make_inputs(64, 16, 16, with_segments=True, log_decay_scale=-40.0)
        got = self.kernel_results(inputs)
        assert all(t.isfinite().all() for t in got.values())
        assert_parity(got, self.reference(inputs))

    def test_growing_exponents_are_not_clamped(self):
        inputs = make_inputs(64, 16, 16, log_decay_scale=0.5)
        want = self.reference(inputs)
        assert want["y"].abs().max() > 1e6
        assert_parity(self.kernel_results(inputs), want)

    def test_strided_and_conjugated_views_are_read_right(self):
        inputs = make_inputs(16, 16, 16, batch=2)
        b, c, x, a_log, decay = inputs.tensors
        views = [
            b.conj().resolve_conj().conj(),
            c.transpose(2, 3).contiguous().transpose(2, 3),
            torch.complex(0 * x, -x).conj().imag,
            a_log.flip(0).flip(0),
            decay.repeat_interleave(2, -1)[..., ::2],
        ]
        y, state = ssd_triton.per_chunk_ssd_triton(*(t.to(self.device) for t in views))
        want = self.reference(inputs)
        assert_parity({"y": y, "state": state}, {n: want[n] for n in ("y", "state")})

    def test_a_conjugate_that_counts_as_contiguous_keeps_its_sign(self):
        inputs = make_inputs(1, 1, 1)
        single = [t[:, :1, :, :1] for t in inputs.tensors]
        single[0] = single[0].clone().conj()
        y, state = ssd_triton.per_chunk_ssd_triton(*(t.to(self.device) for t in single))
        assert single[0].imag.is_contiguous()
        want = per_chunk_ssd_pytorch(*Inputs(single, None).in_float64().tensors)
        assert_parity({"y": y, "state": state}, dict(zip(("y", "state"), want, strict=True)))

    @pytest.mark.parametrize("used", [0, 1], ids=["y", "state"])
    def test_gradient_of_one_output_alone(self, used):
        inputs = make_inputs(16, 16, 16)

        def grads(function, device, inputs):
            leaves = [t.detach().to(device).requires_grad_() for t in inputs.tensors]
            loss = function(*leaves)[used].abs().square().sum()
            return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

        got = grads(ssd_triton.per_chunk_ssd_triton, self.device, inputs)
        want = grads(per_chunk_ssd_pytorch, "cpu", inputs.in_float64())
        assert sum(bool(t.any()) for t in want) >= 3
        for name, g, w in zip(NAMES, got, want, strict=True):
            assert (g.cpu() - w).norm() <= TOLERANCE[name] * w.norm(), name

    def test_only_inputs_that_need_a_gradient_get_one(self):
        inputs = make_inputs(16, 16, 16)
        leaves = [t.to(self.device) for t in inputs.tensors]
        leaves[2].requires_grad_()
        y, state = ssd_triton.per_chunk_ssd_triton(*leaves)
        (y.sum() + state.real.sum()).backward()
        assert leaves[2].grad.abs().sum() > 0
        assert all(t.grad is None for i, t in enumerate(leaves) if i != 2)

    def test_second_derivatives_are_refused(self):
        leaves = [t.to(self.device).requires_grad_() for t in make_inputs(16, 16, 16).tensors]
        y, _ = ssd_triton.per_chunk_ssd_triton(*leaves)
        (grad,) = torch.autograd.grad(y.square().sum(), leaves[2], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    def test_repeated_calls_are_bitwise_equal(self):
        inputs = make_inputs(64, 16, 16, complex_x=True)
        first, second = self.kernel_results(inputs), self.kernel_results(inputs)
        assert all(torch.equal(first[name], second[name]) for name in first)

    @pytest.mark.parametrize(
        "position, change, error, words",
        [
            (0, lambda t: t.to(torch.complex128), TypeError, "complex64"),
            (2, lambda t: t.double(), TypeError, "Xc is torch.float64"),
            (1, lambda t: t[..., :8], UserError, "Cc"),
            (3, lambda t: t[:, :, :8], UserError, "Ac"),
            (4, lambda t: t.to("meta"), UserError, "decay_states"),
            (2, lambda t: t[0], UserError, "5 dimensions"),
        ],
    )
    def test_wrong_tensors_are_refused_before_a_launch(self, position, change, error, words):
        tensors = [t.to(self.device) for t in make_inputs(16, 16, 16).tensors]
        tensors[position] = change(tensors[position])

        def call():
            with pytest.raises(error, match=words):
                ssd_triton.per_chunk_ssd_triton(*tensors)

        assert launches_during(call) == 0

    @pytest.mark.parametrize(
        "dims, name", [((24, 16, 16), "chunk_size=24"), ((16, 512, 16), "N=512")]
    )
    def test_dimensions_that_do_not_fit_are_named(self, dims, name):
        tensors = [t.to(self.device) for t in make_inputs(*dims).tensors]
        with pytest.raises(ValueError, match=name):
            ssd_triton.per_chunk_ssd_triton(*tensors)

    def test_without_triton_the_error_says_what_to_do(self, monkeypatch):
        monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
        tensors = [t.to(self.device) for t in make_inputs(16, 16, 16).tensors]
        with pytest.raises(ImportError, match="pip install triton"):
            ssd_triton.per_chunk_ssd_triton(*tensors)

    def test_refusals_name_their_reason(self, monkeypatch):
        def refuse(device=self.device, head_dim=64, state_dim=64, chunk_size=64):
            return ssd_triton.refuse(
                head_dim=head_dim,
                state_dim=state_dim,
                chunk_size=chunk_size,
                device=torch.device(device),
            )

        assert refuse() is None
        assert "P=512 exceeds the 256-cap" in refuse(head_dim=512)
        assert "N=48 is not a power of two" in refuse(state_dim=48)
        assert "chunk_size=0 is not a power of two" in refuse(chunk_size=0)
        assert "'meta'" in refuse("meta")
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert "TRITON_INTERPRET=1" in refuse("cpu")
        monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
        assert refuse() == "Triton is not installed."

    def test_block_runs_the_kernel_and_equals_the_pytorch_path(self, capsys):
        """The companion of the pinned parity test, which a fallback would pass as well."""
        shape = {
            "d_model": 32, "n_heads": 2, "head_dim": 16, "state_dim": 16, "chunk_size": 16,
            "ffn_dim": 32,
        }  # fmt: skip
        torch.manual_seed(0)
        plain = Mamba3Block(shape | {"ssd_dispatch": "pytorch"}).to(self.device)
        kernel = Mamba3Block(shape | {"ssd_dispatch": "triton"}).to(self.device)
        kernel.load_state_dict(plain.state_dict())
        hidden = torch.randn(2, 40, 32, device=self.device)
        outputs = []
        launched = launches_during(lambda: outputs.append(kernel(hidden)))
        assert launched == 1
        assert launches_during(lambda: outputs.append(plain(hidden))) == 0
        assert "falling back" not in capsys.readouterr().out
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
        grads = [
            torch.autograd.grad(y.square().sum(), list(block.parameters()))
            for y, block in zip(outputs, (kernel, plain), strict=True)
        ]
        for got, want in zip(*grads, strict=True):
            assert (got - want).norm() <= 1e-4 * want.norm()
