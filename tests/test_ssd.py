"""The SSD functions against the oracle: values, states, every gradient, at real lengths."""

import pytest
import torch
from torch import Tensor

from mamba3_lite.errors import UserError
from mamba3_lite.measure import parity
from mamba3_lite.models import ssd_backends, ssd_rotated
from mamba3_lite.models.ssd_complex import (
    per_chunk_ssd_pytorch,
    ssd_complex_chunkwise,
    ssd_naive_complex,
)

PATHS = ("pytorch", "rotated")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def case(length: int, heads=2, state=8, channels=4, batch=1, seed=0) -> dict[str, Tensor]:
    """Small float64 inputs of the public complex functions."""
    shape = (batch, length, heads)

    def draw_complex(first: int) -> Tensor:
        return torch.complex(*(draw(*shape, state, seed=s) for s in (first, first + 1)))

    return {
        "x": draw(*shape, channels, seed=seed),
        "A": torch.tensor([-1.0 + 0.5j, -0.02 + 3.14j] * heads, dtype=torch.complex128)[:heads],
        "B_t": draw_complex(seed + 1),
        "C_t": draw_complex(seed + 3),
        "dt": draw(*shape, seed=seed + 5),
    }


def relative(got: Tensor, want: Tensor) -> float:
    # The floor: a single token with no state before it has a gradient of exactly zero for dt and A.
    return float((got - want).norm() / want.norm().clamp_min(1e-3))


def gradients(run, inputs: dict[str, Tensor], weight: Tensor) -> list[Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    (run(**leaves) * weight).sum().backward()
    return [leaf.grad for leaf in leaves.values()]


def test_chunkwise_matches_naive_complex():
    """Pinned by the contract: complex x, the real part of the oracle."""
    inputs = case(200)
    inputs["x"] = torch.complex(inputs["x"], draw(*inputs["x"].shape, seed=9))
    want = ssd_naive_complex(**inputs)
    assert want.is_complex()
    got = ssd_complex_chunkwise(**inputs, chunk_size=64)
    assert not got.is_complex()
    assert relative(got, want.real) < 1e-12
    weight = draw(*want.shape, seed=7)
    wanted = gradients(lambda **i: ssd_naive_complex(**i).real, inputs, weight)
    found = gradients(lambda **i: ssd_complex_chunkwise(**i, chunk_size=64), inputs, weight)
    assert max(map(relative, found, wanted)) < 1e-11


# case A01
@pytest.mark.parametrize("raw_dt", [0.0, 2.0, 5.0, None])
@pytest.mark.parametrize("length", [64, 127, 128, 129, 2048])
@pytest.mark.parametrize("path", PATHS)
def test_acc1_a01_finite_and_right_at_real_lengths(path, length, raw_dt):
    """Chunk 64, production head shape, the lengths at which exp-then-mask is NaN."""
    problem = parity.Problem(length, raw_dt, parity.DECAYS[0], False, False)
    result = parity.check(ssd_backends.BACKENDS[path].run, problem, 64, torch.float32)
    assert result.finite
    assert result.failures(problem, torch.float32) == []


# case A07
@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("path", PATHS)
def test_acc2_a07_every_length_and_chunk_size(path, chunk):
    for length in sorted({1, 2, 3, 7, max(1, chunk - 1), chunk, chunk + 1, 3 * chunk + 5}):
        inputs = case(length, seed=length)
        weight = draw(1, length, 2, 4, seed=3)
        want = gradients(lambda **i: ssd_naive_complex(**i).real, inputs, weight)
        got = gradients(
            lambda **i: ssd_complex_chunkwise(**i, chunk_size=chunk, ssd_dispatch=path),
            inputs,
            weight,
        )
        assert max(map(relative, got, want)) < 1e-10, (length, chunk)


@pytest.mark.parametrize("path", PATHS)
def test_acc2_a07_gradcheck(path):
    inputs = case(7, heads=1, state=2, channels=2)
    leaves = [value.requires_grad_() for value in inputs.values()]

    def run(*args: Tensor) -> Tensor:
        return ssd_complex_chunkwise(*args, chunk_size=3, ssd_dispatch=path)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_does_not_depend_on_the_chunk_size(path):
    inputs = case(130)
    outputs = [
        ssd_complex_chunkwise(**inputs, chunk_size=c, ssd_dispatch=path) for c in (1, 7, 64, 256)
    ]
    assert max(relative(y, outputs[0]) for y in outputs) < 1e-12


# case A08
@pytest.mark.parametrize("cuts", [[100], [1, 2, 199], [63, 64, 65, 130], [10, 20, 30, 40, 41]])
@pytest.mark.parametrize("path", PATHS)
def test_acc3_a08_segments_with_carried_state(path, cuts):
    inputs = {
        n: v.to(torch.complex64 if v.is_complex() else torch.float32) for n, v in case(200).items()
    }
    whole, final = ssd_complex_chunkwise(
        **inputs, chunk_size=32, ssd_dispatch=path, return_final_state=True
    )
    state, pieces = None, []
    for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
        part = {n: v if n == "A" else v[:, start:stop] for n, v in inputs.items()}
        y, state = ssd_complex_chunkwise(
            **part, chunk_size=32, ssd_dispatch=path, initial_state=state, return_final_state=True
        )
        pieces.append(y)
    assert relative(torch.cat(pieces, 1), whole) < 1e-5
    assert relative(state, final) < 1e-5


# case A09
@pytest.mark.parametrize("path", PATHS)
def test_a09_gradients_flow_through_both_states(path):
    inputs = case(50)
    initial = torch.complex(draw(1, 2, 8, 4), draw(1, 2, 8, 4, seed=1))

    def final_state(run, **leaves):
        return torch.view_as_real(run(**leaves, return_final_state=True)[1])

    weight = draw(1, 2, 8, 4, 2, seed=2)
    given = {**inputs, "initial_state": initial}
    leaves = {n: v.clone().requires_grad_() for n, v in given.items()}
    reference = {n: v.clone().requires_grad_() for n, v in given.items()}
    state = final_state(
        lambda **i: ssd_complex_chunkwise(**i, chunk_size=16, ssd_dispatch=path), **leaves
    )
    oracle = final_state(ssd_naive_complex, **reference)
    got = torch.autograd.grad((state * weight).sum(), list(leaves.values()), allow_unused=True)
    want = torch.autograd.grad((oracle * weight).sum(), list(reference.values()), allow_unused=True)
    for name, g, w in zip(given, got, want, strict=True):
        if name == "C_t":  # the state does not depend on what reads it
            assert w is None
            continue
        assert relative(g, w) < 1e-11, name
        assert float(w.norm()) > 0


# case A10
@pytest.mark.parametrize("path", PATHS)
def test_acc4_a10_packed_documents_do_not_leak(path):
    lengths = [1, 63, 64, 65, 130]
    inputs = case(sum(lengths))
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None]
    weight = draw(1, sum(lengths), 2, 4, seed=11)

    def packed(**i):
        return ssd_complex_chunkwise(**i, chunk_size=64, ssd_dispatch=path, segment_ids=ids)

    def separate(**i):
        parts, start = [], 0
        for n in lengths:
            part = {k: v if k == "A" else v[:, start : start + n] for k, v in i.items()}
            parts.append(ssd_naive_complex(**part).real)
            start += n
        return torch.cat(parts, 1)

    assert relative(packed(**inputs), separate(**inputs)) < 1e-12
    got, want = gradients(packed, inputs, weight), gradients(separate, inputs, weight)
    assert max(map(relative, got, want)) < 1e-11
    edited = {n: v.clone() for n, v in inputs.items()}
    edited["x"][:, 1:64] += 1
    changed = packed(**edited) != packed(**inputs)
    assert bool(changed[:, 1:64].any()) and not bool(changed[:, 64:].any())


@pytest.mark.parametrize("path", PATHS)
def test_growing_modes_are_taken_as_given(path):
    """Re A > 0 is the caller's choice: large, finite, as the oracle; closed gates meet no inf."""
    inputs = case(40)
    inputs["A"] = torch.tensor([0.3 + 1j, 0.05 - 2j], dtype=torch.complex128)
    ids = (torch.arange(40) // 13)[None]
    want = ssd_naive_complex(**inputs, segment_ids=ids).real
    got = ssd_complex_chunkwise(**inputs, chunk_size=16, ssd_dispatch=path, segment_ids=ids)
    assert relative(got, want) < 1e-11


@pytest.mark.parametrize("raw_dt", [-20.0, 0.0, 2.0, 50.0, 1000.0])
@pytest.mark.parametrize("path", PATHS)
def test_extreme_steps_stay_finite(path, raw_dt):
    for decays in parity.DECAYS:
        problem = parity.Problem(129, raw_dt, decays, True, True)
        for dtype in (torch.float32, torch.float64):
            result = parity.check(ssd_backends.BACKENDS[path].run, problem, 64, dtype)
            assert result.failures(problem, dtype) == []


def test_step_continues_a_sequence():
    x, dt = draw(2, 70, 2, 4), draw(2, 70, 2)
    b, c = ((draw(2, 70, 2, 8, seed=s), draw(2, 70, 2, 8, seed=s + 1)) for s in (1, 3))
    a = (torch.tensor([-1.0, -0.02]), torch.tensor([0.5, 3.14]))
    whole, final = ssd_rotated.run(x, b, c, dt, a, chunk_size=16, return_state=True)
    _, state = ssd_rotated.run(
        x[:, :40], *((p[0][:, :40], p[1][:, :40]) for p in (b, c)), dt[:, :40], a,
        chunk_size=16, return_state=True,
    )  # fmt: skip
    for t in range(40, 70):
        y, state = ssd_rotated.step(
            x[:, t], *((p[0][:, t], p[1][:, t]) for p in (b, c)), dt[:, t], a, state
        )
        assert relative(y, whole[:, t]) < 1e-12
    assert relative(state, final) < 1e-12


def test_per_chunk_is_exact_for_real_and_complex_x():
    """Real x gives the real part of what the same x gives as a complex tensor."""
    parts = [draw(1, 2, 8, 2, 4, seed=s) for s in (1, 2, 3, 4)]
    b, c = torch.complex(*parts[:2]), torch.complex(*parts[2:])
    x = draw(1, 2, 8, 2, 3)
    log = torch.complex(-draw(1, 2, 8, 2).abs().cumsum(2), draw(1, 2, 8, 2, seed=1))
    to_end = torch.exp(log[:, :, -1:] - log)
    y, state = per_chunk_ssd_pytorch(b, c, x, log, to_end)
    y_complex, same = per_chunk_ssd_pytorch(b, c, x.to(torch.complex128), log, to_end)
    assert relative(y, y_complex.real) < 1e-14 and relative(state, same) < 1e-14


def planted_missing_phase(x, b, c, dt, a, **options):
    return ssd_rotated.run(x, b, c, dt, (a[0], 0 * a[1]), **options)


def planted_missing_carry(x, b, c, dt, a, *, chunk_size, state, return_state, segment_ids):
    """Each chunk on its own: what is left of the sequence when nothing is carried."""
    y, final = ssd_rotated.run(
        x, b, c, dt, a,
        chunk_size=chunk_size, state=state, return_state=True, segment_ids=segment_ids,
    )  # fmt: skip
    chunk_ids = torch.arange(x.shape[1])[None] // chunk_size
    y, _ = ssd_rotated.run(x, b, c, dt, a, chunk_size=chunk_size, segment_ids=chunk_ids)
    return y, final


def planted_three_percent(x, b, c, dt, a, **options):
    y, final = ssd_rotated.run(x, b, c, dt, a, **options)
    return 1.03 * y, final


# case A06
@pytest.mark.parametrize(
    "fault", [planted_missing_phase, planted_missing_carry, planted_three_percent]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a06_planted_faults_are_found(fault, dtype):
    problem = parity.Problem(129, None, parity.DECAYS[0], False, False)
    assert parity.check(ssd_rotated.run, problem, 64, dtype).failures(problem, dtype) == []
    failures = parity.check(fault, problem, 64, dtype).failures(problem, dtype)
    assert any(failure.startswith("y ") for failure in failures), failures


def test_auto_says_once_what_it_chose(capsys):
    ssd_backends._choose.cache_clear()
    shape = ssd_backends.Shape(16, 16, 32, torch.device("cpu"))
    chosen = {ssd_backends.resolve("auto", shape).name for _ in range(3)}
    lines = capsys.readouterr().out.strip().splitlines()
    assert ssd_backends.AUTO_ORDER == ("fused", "rotated", "pytorch") and chosen == {"rotated"}
    assert len(lines) == 1 and lines[0].startswith("[ssd] auto: 'rotated' (parity with the oracle")
    assert "; not 'fused': " in lines[0]


def test_auto_passes_over_a_path_that_disagrees(monkeypatch, capsys):
    ssd_backends._choose.cache_clear()
    monkeypatch.setattr(
        ssd_backends, "_parity_error", lambda name, device: 0.5 if name == "rotated" else 1e-7
    )
    shape = ssd_backends.Shape(16, 16, 32, torch.device("cpu"))
    assert ssd_backends.resolve("auto", shape).name == "pytorch"
    assert "not 'rotated': relative error 5.0e-01" in capsys.readouterr().out
    ssd_backends._choose.cache_clear()


def test_mistakes_are_named():
    inputs = case(10)
    with pytest.raises(UserError, match="ssd_dispatch='fast' is unknown"):
        ssd_complex_chunkwise(**inputs, ssd_dispatch="fast")
    with pytest.raises(UserError, match="dt has shape"):
        ssd_complex_chunkwise(**{**inputs, "dt": inputs["dt"][:, :5]})
    with pytest.raises(UserError, match="needs real x"):
        complex_x = inputs["x"].to(torch.complex128)
        ssd_complex_chunkwise(**{**inputs, "x": complex_x}, ssd_dispatch="rotated")


@pytest.mark.parametrize("path", PATHS)
def test_a_sample_of_the_long_grid(path):
    """T = 2048 with state and segments; the whole grid is the campaign below."""
    for problem in (
        parity.Problem(2048, None, parity.DECAYS[1], True, True),
        parity.Problem(2048, 50.0, parity.DECAYS[1], True, False),
    ):
        for dtype in (torch.float32, torch.float64):
            result = parity.check(ssd_backends.BACKENDS[path].run, problem, 128, dtype)
            assert result.failures(problem, dtype) == []


@pytest.mark.campaign
@pytest.mark.parametrize("length", parity.LENGTHS)
def test_campaign_whole_parity_grid(length):
    rows = parity.sweep(PATHS, parity.problems([length]))
    failures = [failure for row in rows.values() for failure in row.failures]
    assert failures == []
    assert sum(row.cases for row in rows.values()) == 6 * 2 * 2 * 2 * 2 * 2 * 4
