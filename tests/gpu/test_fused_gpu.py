"""The fused kernels on CUDA: parity at real sizes and precisions, the choice of a plan, training.

Nearly all the time goes into compiling, once for each shape and kind of call; so the tests share
shapes, and where the choice of a plan is not what is tested the first candidate is forced.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mamba3_lite.measure import parity
from mamba3_lite.models import ssd_backends, ssd_fused, ssd_rotated, ssd_triton
from mamba3_lite.models.ssd_plans import CANDIDATES
from mamba3_lite.training.compile import compile_blocks
from tests import fused_checks
from tests.fused_checks import FusedChecks, answers, draw, relative, token_ids, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs Triton"),
]
DEVICE = "cuda"
GIB = 2**30
FIRST = CANDIDATES[0]
PRECISIONS = (torch.bfloat16, torch.float32)
# The production shape, and the one of the tests in which a plan is chosen.
HEADS, DIM = 16, 64
SMALL = {"heads": 3, "state_dim": 16, "head_dim": 16}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(autouse=True)
def one_cache_for_all(cache, monkeypatch):
    """Not the user's, and not a new one for each test: choosing takes seconds."""
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(cache))


@pytest.mark.campaign
class TestOnCuda(FusedChecks):
    device = DEVICE


def needs(gib: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.parametrize("length", [1, 63, 64, 65, 2048, 8192])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=["bf16", "fp32"])
def test_parity_with_the_oracle(dtype, length):
    problem = parity.Problem(length, None, parity.DECAYS[length % 2], True, True)
    with ssd_fused.forced(FIRST):
        fused_checks.assert_parity(problem, dtype, DEVICE)


# case A01
@pytest.mark.parametrize("raw_dt", [-20.0, 0.0, 2.0, 50.0, 1000.0])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=["bf16", "fp32"])
def test_any_step_is_finite_and_right_a01(dtype, raw_dt):
    with ssd_fused.forced(FIRST):
        for decays in parity.DECAYS:
            problem = parity.Problem(65, raw_dt, decays, True, True)
            fused_checks.assert_parity(problem, dtype, DEVICE)


# case A04
def test_every_candidate_is_right_a04():
    for plan in CANDIDATES:
        problem = ssd_fused._problem(plan, torch.device(DEVICE), torch.bfloat16, (2, 64, 64))
        assert problem is None, plan


# Compiling takes a minute and more for the last two.
LARGE = [pytest.param(*dims, marks=pytest.mark.campaign) for dims in ((256, 16), (256, 256))]


# case A14
@pytest.mark.parametrize(
    "state_dim, head_dim", [(16, 16), (32, 32), (128, 128), (16, 256), (100, 40), *LARGE]
)
def test_any_dimension_a14(state_dim, head_dim):
    problem = draw(
        130, batch=2, heads=3, state_dim=state_dim, head_dim=head_dim, starts=(20, 70),
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    with ssd_fused.forced(FIRST):
        fused_checks.assert_right(problem)


def test_float16():
    with ssd_fused.forced(FIRST):
        fused_checks.assert_right(
            draw(130, **SMALL, starts=(20, 70), dtype=torch.float16, device=DEVICE)
        )


class Production:
    """The production shape in bfloat16 as in training, with its gradients, made on the device."""

    def __init__(self, batch: int, length: int):
        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        generator = torch.Generator(DEVICE).manual_seed(length)
        self.sizes = {"heads": HEADS, "state_dim": DIM, "head_dim": DIM}
        self.proj = numbers(batch, length, HEADS * (5 * DIM + 1))
        self.proj[..., -HEADS:] *= 0.64
        self.dy = numbers(batch, length, HEADS, DIM)
        self.a = torch.tensor([[-1.0, -1e-3], [0.5, 3.14]], device=DEVICE).repeat(1, HEADS // 2)

    def results(self, element: int | None = None) -> dict[str, Tensor]:
        """y, d_proj and dA of the whole batch, or of one element alone."""
        which = slice(None) if element is None else slice(element, element + 1)
        proj, a = self.proj[which].detach().requires_grad_(), self.a.clone().requires_grad_()
        with ssd_fused.forced(FIRST):
            y, _ = ssd_fused.run_projected(proj, a.unbind(), **self.sizes)
            d_proj, d_a = torch.autograd.grad(y, [proj, a], self.dy[which])
        return {"y": y.detach(), "proj": d_proj, "a": d_a}

    def streams(self, proj: Tensor, picked: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """The parts of a projection, (1, T, streams, ...) in float64, of some (element, head)."""
        parts = proj.split([HEADS * DIM] * 5 + [HEADS], -1)
        split = [p.unflatten(-1, (HEADS, -1)) for p in parts]
        taken = [torch.stack([p[b, :, h] for b, h in picked], 1)[None].double() for p in split]
        taken[-1] = taken[-1].squeeze(-1)
        return dict(zip(("x", "b_re", "b_im", "c_re", "c_im", "dt"), taken, strict=True))

    def truth(self, picked: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """The same of those streams, by the plain path in float64."""
        leaves = {n: t.requires_grad_() for n, t in self.streams(self.proj, picked).items()}
        heads = [h for _, h in picked]
        leaves["a"] = self.a[:, heads].double().requires_grad_()
        y, _ = ssd_rotated.run(
            leaves["x"], (leaves["b_re"], leaves["b_im"]), (leaves["c_re"], leaves["c_im"]),
            leaves["dt"], leaves["a"].unbind(), chunk_size=256,
        )  # fmt: skip
        dy = torch.stack([self.dy[b, :, h] for b, h in picked], 1)[None].double()
        found = torch.autograd.grad((y * dy).sum(), list(leaves.values()))
        return {"y": y.detach()} | dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("batch", [1, 16])
def test_131072_tokens_against_float64_on_sampled_streams(batch):
    needs(16 + 6 * batch)
    problem = Production(batch, 131_072)
    # The offsets of the last ones are beyond 32 bits at batch 16.
    picked = [(0, 0), (batch // 2, 7), (batch - 1, HEADS - 1)]
    got, want = problem.results(), problem.truth(picked)
    found = problem.streams(got["proj"], picked)
    found["y"] = torch.stack([got["y"][b, :, h] for b, h in picked], 1)[None]
    if batch == 1:  # otherwise dA is a sum over the batch
        found["a"] = got["a"][:, [h for _, h in picked]]
    errors = {name: relative(found[name], want[name]) for name in found}
    limits = dict.fromkeys(errors, 5e-3) | {"dt": 1e-2, "a": 1e-1}
    assert all(errors[name] <= limits[name] for name in errors), errors


# case A05
@pytest.mark.parametrize("batch, length", [(820, 512), (4200, 64)])
def test_the_last_element_of_a_big_batch_equals_it_alone_a05(batch, length):
    needs(20)
    problem = Production(batch, length)
    # Either offsets beyond 32 bits, or more streams than axes 1 and 2 of a grid could hold.
    assert problem.proj.numel() > 2**31 or batch * HEADS > 65_535
    many, alone = problem.results(), problem.results(batch - 1)
    for name in ("y", "proj"):
        assert bool(alone[name].any()) and torch.equal(many[name][-1:], alone[name]), name


def test_phase_is_right_after_a_million_tokens():
    """Float32 against float64, with decays so slow that the phase of long ago still counts."""
    length = 2**20
    needs(40)
    generator = torch.Generator(DEVICE).manual_seed(0)
    proj = torch.randn(1, length, 2 * (5 * DIM + 1), generator=generator, device=DEVICE)
    proj[..., -2:] = 2.0 + 0.1 * proj[..., -2:]
    a = torch.tensor([[-1e-2, -1e-4], [torch.pi, 0.3]], device=DEVICE)
    state = torch.randn(1, 2, 2 * DIM, DIM, generator=generator, device=DEVICE)
    rest = {"heads": 2, "state_dim": DIM, "head_dim": DIM, "return_state": True}
    one_document = torch.zeros(1, length, dtype=torch.int64, device=DEVICE)
    with torch.no_grad(), ssd_fused.forced(FIRST):
        y, final = ssd_fused.run_projected(
            proj, a.unbind(), state=state, segment_ids=one_document, **rest
        )
        want, want_final = fused_checks.run_rotated(
            proj.double(), a.double().unbind(), state=state.double(), **rest
        )
    assert bool(y.isfinite().all())
    assert relative(y[:, -4096:], want[:, -4096:]) < 1e-4
    assert relative(final, want_final) < 1e-4


# case A16
def test_gradients_are_bitwise_equal_twice_a16():
    problem = Production(4, 2048)
    fused_checks.assert_bitwise_equal(problem.results(), problem.results())


def count_choices(monkeypatch) -> list[tuple]:
    choices: list[tuple] = []
    choose: Callable = ssd_fused._choose
    monkeypatch.setattr(ssd_fused, "_choose", lambda *a: (choices.append(a), choose(*a))[1])
    return choices


def test_auto_picks_fused_and_says_so_in_one_line(capsys):
    ssd_backends._choose.cache_clear()
    shape = ssd_backends.Shape(16, 16, 64, torch.device(DEVICE), heads=3)
    assert {ssd_backends.resolve("auto", shape).name for _ in range(3)} == {"fused"}
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("[ssd] auto: 'fused' (")


# cases A13, A15, E03
def test_a_shape_is_tested_once_and_its_first_call_is_right_a13_a15_e03(monkeypatch, tmp_path):
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path))
    ssd_fused.plan_for.cache_clear()
    choices = count_choices(monkeypatch)

    def call(length: int) -> dict[str, Tensor]:
        return answers(
            ssd_fused.run_projected,
            draw(length, **SMALL, starts=(length // 2,), dtype=torch.bfloat16, device=DEVICE),
        )

    first, second = call(130), call(130)
    fused_checks.assert_bitwise_equal(first, second)
    assert choices == [(torch.device(DEVICE, 0), torch.bfloat16, tuple(SMALL.values()))]
    for length in range(64, 64 + 20 * 37, 37):
        call(length)
    ssd_fused.plan_for.cache_clear()  # as in a new process
    call(200)
    assert len(choices) == 1


# cases A12, A16, A17
def test_compilation_checkpointing_and_repetition_change_no_loss_a12_a16_a17():
    ids = token_ids(2, 101, DEVICE)
    kinds = {
        "plain": {}, "again": {}, "checkpointed": {"grad_checkpoint": True},
        "selective": {"grad_checkpoint": "selective"}, "compiled": {},
    }  # fmt: skip
    losses, weights = {}, {}
    for kind, changes in kinds.items():
        net = fused_checks.model(DEVICE, n_heads=3, **changes)
        if kind == "compiled":
            compile_blocks(net, "default")
        losses[kind] = train(net, 20, ids, bf16=True)
        weights[kind] = {n: p.detach() for n, p in net.named_parameters()}
        for name, parameter in net.named_parameters():
            assert parameter.grad.dtype == parameter.dtype, name
            assert bool(parameter.grad.isfinite().all()), name
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]
    fused_checks.assert_bitwise_equal(
        weights["again"] | {"losses": losses["again"]},
        weights["plain"] | {"losses": losses["plain"]},
    )
    for kind in ("checkpointed", "selective", "compiled"):
        # Rounding differs, and after some ten steps of this size it has grown beyond comparing.
        assert losses[kind][:10].tolist() == pytest.approx(losses["plain"][:10].tolist(), rel=2e-2)


def test_the_model_in_bf16_equals_the_rotated_one_in_float32():
    ids, logits = token_ids(2, 101, DEVICE), {}
    for path in ("fused", "rotated"):
        net = fused_checks.model(DEVICE, n_heads=3, ssd_dispatch=path)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=path == "fused"):
            logits[path] = net(ids)
    assert relative(logits["fused"], logits["rotated"]) < 2e-2
