"""Checks of the fused SSD kernels, shared by the interpreted run and the runs on CUDA.

The truth is the token-by-token oracle (``measure.parity``) for its own shape, and elsewhere
``ssd_rotated`` in float64, which is held to the same oracle.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mamba3_lite.measure import parity
from mamba3_lite.models import ssd_fused, ssd_rotated
from mamba3_lite.models.mamba_block import Mamba3Block
from mamba3_lite.models.ssd_plans import CANDIDATES
from mamba3_lite.models.transformer import Mamba3Transformer

# Case A07's lengths around a chunk of 32 (float32) and one of 64 (16 bits).
LENGTHS = (1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 101, 130)
DIMS = ((16, 16), (32, 64), (64, 32), (128, 16), (16, 128), (256, 16), (16, 256), (100, 40))
MODEL = {
    "vocab_size": 61, "d_model": 24, "n_layers": 2, "n_heads": 2, "head_dim": 16, "state_dim": 16,
    "ffn_dim": 32,
}  # fmt: skip
KERNELS = (
    "phase_kernel", "carry_kernel", "output_kernel", "gradient_kernel", "decay_gradient_kernel",
)  # fmt: skip


class Problem(NamedTuple):
    """One call and the loss <y, dy> + <final state, d_final>; states may be absent."""

    proj: Tensor  # (B, T, W)
    a: Tensor  # (2, H)
    state: Tensor | None  # (B, H, 2 N, P)
    segments: Tensor | None  # (B, T)
    dy: Tensor
    d_final: Tensor
    sizes: dict[str, int]  # heads, state_dim, head_dim


def draw(
    length: int,
    *,
    batch: int = 1,
    heads: int = 2,
    state_dim: int = 16,
    head_dim: int = 16,
    with_state: bool = True,
    starts: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Problem:
    """Random numbers that ``dtype`` holds, slow and rotating heads, documents from ``starts``."""
    generator = torch.Generator().manual_seed(length + state_dim + head_dim)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    proj = numbers(batch, length, heads * (head_dim + 4 * state_dim + 1))
    proj[..., -heads:] *= 0.64
    a = torch.tensor([[-1.0, -1e-2], [0.5, 3.14]]).repeat(1, heads)[:, :heads]
    ids = torch.bucketize(torch.arange(length), torch.tensor(starts or (length,)), right=True)
    return Problem(
        proj.to(device, dtype),
        a.to(device),
        numbers(batch, heads, 2 * state_dim, head_dim).to(device) if with_state else None,
        ids.repeat(batch, 1).to(device) if starts else None,
        numbers(batch, length, heads, head_dim).to(device, dtype),
        numbers(batch, heads, 2 * state_dim, head_dim).to(device),
        {"heads": heads, "state_dim": state_dim, "head_dim": head_dim},
    )


def part(problem: Problem, start: int, stop: int, state: Tensor | None) -> Problem:
    """Tokens start to stop, from a given state."""
    segments = None if problem.segments is None else problem.segments[:, start:stop]
    return problem._replace(
        proj=problem.proj[:, start:stop], dy=problem.dy[:, start:stop],
        state=state, segments=segments,
    )  # fmt: skip


def call(run: Callable, problem: Problem, proj: Tensor, a: Tensor, state: Tensor | None):
    return run(
        proj, a.unbind(), **problem.sizes,
        state=state, return_state=True, segment_ids=problem.segments,
    )  # fmt: skip


def run_rotated(proj: Tensor, a, *, heads: int, state_dim: int, head_dim: int, **rest):
    """``run_projected`` by the plain path, in the precision of ``proj``."""
    x, *pairs, dt = proj.split([heads * head_dim, *[heads * state_dim] * 4, heads], -1)
    x, *pairs = (t.unflatten(-1, (heads, -1)) for t in (x, *pairs))
    return ssd_rotated.run(x, tuple(pairs[:2]), tuple(pairs[2:]), dt, a, chunk_size=64, **rest)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """y and the final state of the fused path."""
    with torch.no_grad():
        return call(ssd_fused.run_projected, problem, problem.proj, problem.a, problem.state)


def gradients(
    run: Callable, problem: Problem, loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Both outputs, and the gradient of ``loss`` of them for every input; names as in parity."""
    given = (problem.proj, problem.a, problem.state)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in given]
    y, final = call(run, problem, *leaves)
    used = [leaf for leaf in leaves if leaf is not None]
    d_proj, d_a, *d_state = torch.autograd.grad(loss(y, final), used)
    heads, state_dim, head_dim = (problem.sizes[n] for n in ("heads", "state_dim", "head_dim"))
    pieces = d_proj.split([heads * head_dim, *[2 * heads * state_dim] * 2, heads], -1)
    named = dict(zip(("dx", "dB", "dC", "ddt"), pieces, strict=True))
    named |= {"y": y.detach(), "state": final.detach(), "dA": d_a}
    return named | dict(zip(("dstate",), d_state, strict=False))


def answers(run: Callable, problem: Problem) -> dict[str, Tensor]:
    """Outputs and gradients of the problem's own loss."""
    return gradients(
        run, problem,
        lambda y, final: (y * problem.dy.to(y)).sum() + (final * problem.d_final.to(final)).sum(),
    )  # fmt: skip


def wide(problem: Problem) -> Problem:
    """The same numbers in float64."""
    state = None if problem.state is None else problem.state.double()
    return problem._replace(proj=problem.proj.double(), a=problem.a.double(), state=state)


def relative(got: Tensor, want: Tensor) -> float:
    got, want = (torch.view_as_real(t) if t.is_complex() else t for t in (got, want))
    return float((got.double() - want.double()).norm() / want.double().norm())


def failures(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> dict:
    """Relative L2 errors beyond the limits of parity; float16 keeps those of bfloat16."""
    limits = parity.LIMITS[torch.float32 if dtype == torch.float32 else torch.bfloat16]
    errors = {name: relative(got[name], want[name]) for name in want}
    return {name: error for name, error in errors.items() if not error <= limits[name]}


def assert_right(problem: Problem) -> None:
    """Outputs, states and all gradients against ``ssd_rotated`` in float64."""
    got, want = answers(ssd_fused.run_projected, problem), answers(run_rotated, wide(problem))
    assert got["y"].dtype == problem.proj.dtype and got["state"].dtype == torch.float32
    assert failures(got, want, problem.proj.dtype) == {}


def assert_bitwise_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def assert_parity(problem: parity.Problem, dtype: torch.dtype, device: str) -> None:
    """Against the token-by-token oracle, at 2 heads of 64 channels and 64 complex states."""
    result = parity.check(ssd_fused.run, problem, 64, dtype, device)
    failed = result.failures(problem, dtype)
    assert failed == [], problem


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclasses.dataclass
class _Watched:
    """Stands in for a kernel: notes each launch, and makes it or not."""

    kernel: Any
    launches: list[Launch]
    really: bool

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*given: Any, **keywords: Any) -> None:
            names = self.kernel.arg_names
            arguments = dict(zip(names, given, strict=False))
            arguments |= {n: v for n, v in keywords.items() if n in names}
            options = {n: v for n, v in keywords.items() if n not in names}
            self.launches.append(Launch(self.kernel, grid, arguments, options))
            if self.really:
                self.kernel[grid](*given, **keywords)

        return launch


@contextlib.contextmanager
def watched(*, really: bool = True) -> Iterator[list[Launch]]:
    """Every launch made inside; without ``really`` nothing runs, and results are what was there."""
    from mamba3_lite.kernels import fused

    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(fused, name, _Watched(getattr(fused, name), launches, really))
        yield launches


def carry_splits(launches: list[Launch]) -> list[int]:
    return [launch.grid[2] for launch in launches if "kept" in launch.arguments]


def variant(folder: Path, old: str, new: str) -> ModuleType:
    """The kernels with one piece of their source replaced wherever it stands."""
    from mamba3_lite.kernels import fused

    assert fused.__file__ is not None
    source = Path(fused.__file__).read_text(encoding="utf-8")
    assert old in source, f"the kernels do not say {old!r} any more"
    path = folder / "variant.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("variant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def planted(folder: Path, old: str, new: str) -> Iterator[None]:
    """Runs the variant in the place of the kernels."""
    from mamba3_lite.kernels import fused

    faulty = variant(folder, old, new)
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setattr(fused, name, getattr(faulty, name))
        yield


def train(model: Mamba3Transformer, opt_steps: int, ids: Tensor, *, bf16: bool = False):
    """Losses of a few optimizer steps on one batch."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(opt_steps):
        optimizer.zero_grad()
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = model(ids[:, :-1])
        # Flattened, since the loss of a (B, vocab, T) adds up atomically on CUDA.
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def model(device: str, **changes: Any) -> Mamba3Transformer:
    torch.manual_seed(0)
    return Mamba3Transformer({**MODEL, "ssd_dispatch": "fused", **changes}).to(device)


def token_ids(batch: int, length: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, MODEL["vocab_size"], (batch, length), generator=generator).to(device)


class FusedChecks:
    """A subclass names the device; on "cpu" the process must run with TRITON_INTERPRET=1."""

    device: str

    def draw(self, length: int, **options: Any) -> Problem:
        return draw(length, device=self.device, **options)

    # cases A01, A07
    @pytest.mark.parametrize("length", LENGTHS)
    def test_every_length_and_all_gradients_a07(self, length):
        index = LENGTHS.index(length)
        decays = parity.DECAYS[index % 2]
        raw_dt = (None, 0.0, 2.0)[index % 3]
        problem = parity.Problem(length, raw_dt, decays, index % 4 < 2, index % 4 > 0)
        assert_parity(problem, torch.float32, self.device)

    # case A01
    @pytest.mark.parametrize("raw_dt", parity.RAW_DT)
    def test_any_step_is_finite_and_right_a01(self, raw_dt):
        for decays, with_state in zip(parity.DECAYS, (True, False), strict=True):
            problem = parity.Problem(65, raw_dt, decays, with_state, not with_state)
            assert_parity(problem, torch.float32, self.device)

    @pytest.mark.parametrize("dims", DIMS)
    def test_any_dimension(self, dims):
        batch = 1 + DIMS.index(dims) % 2
        length, starts = (37, (9, 20)) if batch == 1 else (32, ())
        assert_right(
            self.draw(
                length, batch=batch, heads=3 - batch, starts=starts,
                state_dim=dims[0], head_dim=dims[1],
            )
        )  # fmt: skip

    @pytest.mark.parametrize(
        "length, options", [(512, {"with_state": False}), (530, {"starts": (250, 300)})]
    )
    def test_a_long_sequence_of_few_streams_is_cut_into_splits(self, length, options):
        # Under a plan of its own: choosing one would launch the self-test's kernels too.
        with ssd_fused.forced(CANDIDATES[0]), watched() as launches:
            assert_right(self.draw(length, heads=1, **options))
        # Twice in each direction: the ends of the splits, then the states.
        assert carry_splits(launches) == [2] * 4
        # What each span turns, then the phases.
        spans = [launch.grid[1] for launch in launches if "span_turns" in launch.arguments]
        assert spans == [-(-length // 256)] * 2

    # case A08
    @pytest.mark.parametrize("cuts", [[100], [1, 2, 199], [31, 32, 33, 97], [10, 20, 30, 40, 41]])
    def test_pieces_with_carried_state_a08(self, cuts):
        problem = self.draw(200, starts=(40, 150))
        y, final = forward(problem)
        state, pieces = problem.state, []
        for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
            # A piece that begins a document begins from nothing: a piece alone cannot tell.
            if start in (40, 150):
                state = None
            piece, state = forward(part(problem, start, stop, state))
            pieces.append(piece)
        assert relative(torch.cat(pieces, 1), y) < 1e-5
        assert relative(state, final) < 1e-5

    # case A09
    def test_gradients_through_the_final_state_alone_a09(self):
        problem = self.draw(70)

        def loss(y, final):
            return (final * problem.d_final.to(final)).sum()

        got = gradients(ssd_fused.run_projected, problem, loss)
        want = gradients(run_rotated, wide(problem), loss)
        # The final state does not depend on what reads it.
        assert not got.pop("dC").any() and not want.pop("dC").any()
        assert all(bool(got[name].any()) for name in ("dx", "dB", "ddt", "dA", "dstate"))
        assert failures(got, want, torch.float32) == {}

    # case A09
    def test_gradient_of_the_initial_state_alone_a09(self):
        problem = self.draw(70)
        state = problem.state.clone().requires_grad_()
        y, _ = call(ssd_fused.run_projected, problem, problem.proj, problem.a, state)
        twin = problem.state.double().requires_grad_()
        want, _ = call(run_rotated, problem, problem.proj.double(), problem.a.double(), twin)
        (got,) = torch.autograd.grad((y * problem.dy).sum(), state)
        (truth,) = torch.autograd.grad((want * problem.dy).sum(), twin)
        assert bool(truth.any()) and relative(got, truth) < 1e-5

    # case A10
    def test_packed_documents_do_not_leak_a10(self):
        lengths = [1, 63, 64, 65, 130]
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        packed = self.draw(sum(lengths), with_state=False, starts=tuple(starts[1:-1]))
        whole = answers(ssd_fused.run_projected, packed)
        alone = packed._replace(segments=None)
        separate = [
            answers(
                ssd_fused.run_projected,
                # Only the last document reaches the final state.
                part(alone, start, stop, None)._replace(
                    d_final=packed.d_final * float(stop == starts[-1])
                ),
            )
            for start, stop in zip(starts, starts[1:], strict=False)
        ]
        want = {n: torch.cat([s[n] for s in separate], 1) for n in ("y", "dx", "dB", "dC", "ddt")}
        want |= {"state": separate[-1]["state"], "dA": sum(s["dA"] for s in separate)}
        assert failures(whole, want, torch.float32) == {}
        edited = packed._replace(proj=packed.proj.clone())
        edited.proj[:, 1:64] += 1
        # The phase runs on through the documents, so the next ones are rounded differently.
        y = forward(edited)[0]
        assert relative(y[:, 1:64], whole["y"][:, 1:64]) > 0.1
        assert relative(y[:, 64:], whole["y"][:, 64:]) < 1e-6

    def test_padding_is_as_if_it_were_not_there(self):
        block = Mamba3Block({**MODEL, "ssd_dispatch": "fused"}).to(self.device)
        hidden = torch.randn(1, 90, MODEL["d_model"], device=self.device)
        mask = torch.ones(1, 90, dtype=torch.bool, device=self.device)
        mask[:, :20] = mask[:, 75:] = False
        with torch.no_grad():
            y, state = block(hidden, token_mask=mask, return_state=True)
            want, want_state = block(hidden[:, 20:75], return_state=True)
        assert relative(y[:, 20:75], want) < 1e-5 and relative(state, want_state) < 1e-5

    def test_views_and_expanded_gradients_are_read_right(self):
        problem = self.draw(70, batch=2)
        room = torch.randn(2, 70, problem.proj.shape[-1] + 3, device=self.device)
        view = room[..., 1:-2].copy_(problem.proj)
        shifted = problem._replace(proj=view, a=problem.a.t().contiguous().t())
        got = gradients(ssd_fused.run_projected, shifted, lambda y, final: y.sum() + final.sum())
        want = gradients(run_rotated, wide(problem), lambda y, final: y.sum() + final.sum())
        assert failures(got, want, torch.float32) == {}

    # case A16
    def test_repeated_calls_are_bitwise_equal_a16(self):
        problem = self.draw(101, starts=(50,))
        first, second = (answers(ssd_fused.run_projected, problem) for _ in range(2))
        assert_bitwise_equal(first, second)

    @pytest.mark.parametrize("options", [{"starts": (30,)}, {"with_state": False}])
    def test_the_operator_is_well_made(self, options):
        problem = self.draw(40, **options)
        leaves = [t.requires_grad_() for t in (problem.proj, *problem.a.unbind())]
        state = None if problem.state is None else problem.state.requires_grad_()
        found = torch.library.opcheck(
            torch.ops.mamba3_lite.fused_ssd.default,
            (*leaves, state, problem.segments, *problem.sizes.values(), state is not None),
        )
        assert len(found) == 4 and set(found.values()) == {"SUCCESS"}

    # case A17
    def test_a_compiled_block_is_one_graph_without_complex_numbers_a17(self):
        from torch._dynamo.backends.debugging import aot_eager

        graphs = []

        def backend(graph, inputs):
            graphs.append((graph, inputs))
            return aot_eager(graph, inputs)

        eager, compiled = model(self.device), model(self.device)
        for layer in compiled.layers:
            whole = torch.compile(layer._forward_impl, backend=backend, fullgraph=True)
            layer._forward_impl = whole
        for length in (40, 33):
            ids, results = token_ids(1, length, self.device), []
            for net in (eager, compiled):
                net.zero_grad()
                logits = net(ids)
                logits.square().sum().backward()
                results.append({n: p.grad for n, p in net.named_parameters()} | {"": logits})
            assert_bitwise_equal(*results)
        assert graphs
        for graph, inputs in graphs:
            targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
            assert torch.ops.mamba3_lite.fused_ssd in targets
            values = [n.meta.get("example_value") for n in graph.graph.nodes]
            tensors = [t for t in (*inputs, *values) if isinstance(t, Tensor)]
            assert len(tensors) > 20 and not any(t.is_complex() for t in tensors)

    def test_the_model_equals_the_rotated_one(self):
        ids, results = token_ids(2, 50, self.device), []
        for path in ("fused", "rotated"):
            net = model(self.device, ssd_dispatch=path)
            logits = net(ids)
            logits.square().sum().backward()
            results.append({n: p.grad for n, p in net.named_parameters()} | {"": logits.detach()})
        got, want = results
        far = {name: relative(got[name], want[name]) for name in want}
        assert max(far.values()) < 1e-5, far

    def test_checkpointing_and_chunk_size_change_nothing(self):
        ids = token_ids(1, 50, self.device)
        want = train(model(self.device, n_layers=1), 3, ids)
        assert want[2] < want[0]
        for changes in ({"grad_checkpoint": True}, {"chunk_size": 16}):
            assert torch.equal(train(model(self.device, n_layers=1, **changes), 3, ids), want)

    # case A16
    def test_two_runs_are_bitwise_equal_a16(self):
        ids, runs = token_ids(1, 40, self.device), []
        for _ in range(2):
            net = model(self.device, n_layers=1, n_heads=1)
            losses = train(net, 20, ids)
            runs.append({n: p.detach() for n, p in net.named_parameters()} | {"losses": losses})
        assert_bitwise_equal(*runs)

    # case A04
    def test_every_candidate_passes_the_self_test_a04(self):
        # Candidates differ in warps and stages, of which the interpreter knows nothing.
        candidates = CANDIDATES if self.device == "cuda" else CANDIDATES[:1]
        for plan in candidates:
            device = torch.device(self.device)
            assert ssd_fused._problem(plan, device, torch.float32, (2, 16, 16)) is None
