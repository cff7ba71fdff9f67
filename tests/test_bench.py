"""The command bench: what it times, what it refuses, and what its verdicts are worth."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mamba3_lite import cli
from mamba3_lite.errors import UserError
from mamba3_lite.measure import bench, bench_cases, bench_rows, parity
from mamba3_lite.measure.bench_verdict import judge, percent_more
from mamba3_lite.models.transformer import Mamba3Transformer
from mamba3_lite.training.config import load_training_config
from tests.runs import MODEL, config

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TINY = [f"model.{name}={value}" for name, value in MODEL.items()] + [
    "training.micro_batch_size=2", "training.compile=false", "training.total_steps=4",
    "training.warmup_steps=1",
]  # fmt: skip
ALL_CASES = [
    "operator, forward", "operator, with backward", "step", "loader",
    "decode, prefill, batch 1", "decode, token, batch 1",
    "decode, prefill, batch 8", "decode, token, batch 8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with repeats of a few calls, little data, and the gate on a short problem."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "REPEAT_MS", 0.0)
    monkeypatch.setattr(bench_cases, "CORPUS_TOKENS", 2_000)
    short = parity.Problem(65, None, parity.DECAYS[0], False, False)
    monkeypatch.setattr(bench_cases, "PARITY_PROBLEM", short)


def run(*arguments: str) -> int:
    """The exit code of the command on a tiny model."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *TINY, *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one error line."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert "tok/s" not in captured.out
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Verdicts -----------------------------------------------------------------------------------------


def repeats(
    rng: np.random.Generator, *, factor: float = 1.0, noise: float = 0.01, n: int = 8
) -> list[float]:
    return list(186.0 * factor * np.exp(noise * rng.standard_normal(n)))


def test_a_planted_slow_down_of_5_percent_is_worse_and_its_opposite_better() -> None:
    rng = np.random.default_rng(1)
    pairs = [(repeats(rng), repeats(rng, factor=1.05)) for _ in range(100)]
    assert sum(judge(a, b, cases=8).word == "worse" for a, b in pairs) >= 95
    assert sum(judge(b, a, cases=8).word == "better" for a, b in pairs) >= 95
    found = [judge(a, b, cases=8).percent for a, b in pairs]
    assert sum(one.low <= 5 <= one.high for one in found) >= 98
    assert np.mean([one.mean for one in found]) == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_equal_measurements_are_called_different_as_seldom_as_promised(n: int) -> None:
    """With no threshold, and noise that differs between the two: the interval alone."""
    rng = np.random.default_rng(2)
    claimed = sum(
        judge(
            repeats(rng, noise=0.02, n=n), repeats(rng, noise=0.005, n=8), cases=1, least=0
        ).word != "noise"
        for _ in range(2000)
    )  # fmt: skip
    assert claimed <= 0.05 * 2000 + 3 * (0.05 * 0.95 * 2000) ** 0.5


def test_all_cases_of_a_comparison_share_one_chance_of_error() -> None:
    rng = np.random.default_rng(3)

    def any_claimed(cases: int) -> bool:
        words = [judge(repeats(rng), repeats(rng), cases=cases, least=0).word for _ in range(8)]
        return words != ["noise"] * 8

    shared = sum(any_claimed(8) for _ in range(400))
    each = sum(any_claimed(1) for _ in range(400))
    assert shared <= 0.05 * 400 + 3 * (0.05 * 0.95 * 400) ** 0.5 < each


def test_the_threshold_is_what_a_difference_must_be_shown_to_exceed() -> None:
    rng = np.random.default_rng(4)
    pairs = [
        (repeats(rng, noise=0.002), repeats(rng, factor=1.01, noise=0.002)) for _ in range(200)
    ]
    assert all(judge(a, b, cases=8, least=2).word == "noise" for a, b in pairs)
    assert all(judge(a, b, cases=1, least=0.2).word == "worse" for a, b in pairs)
    # A true difference at the threshold is noise but for the promised share, whatever the repeats.
    assert sum(judge(a, b, cases=1, least=1).word == "worse" for a, b in pairs) <= 14


def test_words_say_size_direction_and_interval() -> None:
    same = [10.0, 10.1, 9.9]
    assert judge(same, same, cases=8).words.startswith("noise, +0.0 % [-")
    exact = judge([10.0, 10.0], [10.7, 10.7], cases=8)
    assert exact.words == "worse, 7.0 % more time [7.0, 7.0]"
    assert judge([10.0, 10.0], [9.0, 9.0], cases=8).words == (
        "better, 10.0 % less time [10.0, 10.0]"
    )
    assert judge([5.0, 5.0], [5.0, 5.0], cases=1).words == "noise, +0.0 % [0.0, 0.0]"


def test_the_interval_by_hand() -> None:
    """Logarithms -0.1 and 0.1 (standard error 0.1), then 0.1 and 0.5 (0.2): one degree."""
    found = percent_more(list(np.exp([-0.1, 0.1])), list(np.exp([0.1, 0.5])), confidence=0.95)
    assert np.log1p(found.mean / 100) == pytest.approx(0.3)
    assert np.log1p(found.high / 100) - 0.3 == pytest.approx(12.7062 * 0.05**0.5, rel=1e-5)
    assert 0.3 - np.log1p(found.low / 100) == pytest.approx(12.7062 * 0.05**0.5, rel=1e-5)


# Which rows compare -------------------------------------------------------------------------------


def row(case: str = "step", **changes: Any) -> dict[str, Any]:
    """A row as a file holds it; ``changes`` go where such a field is."""
    settings = {"backend": "fused", "micro_batch_size": 16}
    machine = {
        "gpus": [{"name": "NVIDIA H200"}], "driver": "1", "cpu": {"count": 16}, "threads": 8,
        "python": "3.12.1", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0",
        "git": {"commit": "abcdef0123", "dirty": False},
    }  # fmt: skip
    found = {
        "benchmark": "bench", "case": case, "settings": settings, "environment": machine,
        "repeats_ms": [1.0, 1.01], "time": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    for name, value in changes.items():
        home = next((h for h in (settings, machine) if name in h), found)
        home[name] = value
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.13.0"}, "torch: 2.11.0 -> 2.13.0"),
        ({"triton": "3.7.0"}, "triton: 3.6.0 -> 3.7.0"),
        ({"gpus": []}, "gpus: [{'name': 'NVIDIA H200'}] -> []"),
        ({"cpu": {"count": 8}}, "cpu: {'count': 16} -> {'count': 8}"),
        ({"threads": 4}, "threads: 8 -> 4"),
        ({"micro_batch_size": 8}, "settings.micro_batch_size: 16 -> 8"),
        ({"backend": "rotated"}, "settings.backend: fused -> rotated"),
    ],
)
def test_rows_of_something_else_are_refused_with_the_field(
    change: dict[str, Any], said: str
) -> None:
    new = row(**change)
    with pytest.raises(UserError, match="--across") as problem:
        bench_rows.counterparts([row()], [new], across=False)
    assert f"for 'step': {said}." in str(problem.value)
    assert bench_rows.counterparts([row()], [new], across=True)["step"] == row()


def test_the_newest_row_that_compares_is_taken() -> None:
    rows = [row(time="1"), row(time="2"), row(time="3", torch="2.13.0"), row("loader", time="4")]
    assert bench_rows.counterparts(rows, [row()], across=False)["step"]["time"] == "2"
    assert bench_rows.counterparts(rows, [row()], across=True)["step"]["time"] == "3"
    # The code is what is compared, and a case that is new has nothing to compare with.
    other = row(git={"commit": "0", "dirty": True}, command="x")
    assert bench_rows.counterparts(rows, [other], across=False).keys() == {"step"}
    assert bench_rows.counterparts(rows, [row("operator, forward")], across=False) == {}


# The command --------------------------------------------------------------------------------------


def test_everything_is_timed_recorded_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    assert run("--out", str(out), "--repeats", "3", "--commit", "0123456789") == 0
    found, shown = rows_of(out), capsys.readouterr().out
    assert [one["case"] for one in found] == ALL_CASES
    assert "small for want of a GPU" in shown and all(case in shown for case in ALL_CASES)
    for one in found:
        assert one["environment"]["git"] == {"commit": "0123456789", "dirty": False}
        assert one["environment"]["torch"] == torch.__version__
        assert len(one["repeats_ms"]) == 3 and one["calls_a_repeat"] == bench.FEWEST_CALLS
        assert 0 < one["min_ms"] <= one["median_ms"] <= one["max_ms"]
        has_path = one["case"] != "loader"
        assert (one["parity_relative_l2"] is not None) == has_path
    step, loader = (next(r for r in found if r["case"] == c) for c in ("step", "loader"))
    assert step["settings"]["backend"] == "rotated" and step["settings"]["compile_mode"] is None
    assert step["tokens_per_sec"] == pytest.approx(1e3 * 2 * 24 / step["median_ms"], rel=1e-3)
    assert loader["settings"]["seq_len"] == 24
    assert found[-1]["tokens_per_sec"] == pytest.approx(8e3 / found[-1]["median_ms"], rel=1e-3)
    assert found[-1]["settings"]["prompt_tokens"] == 24


@pytest.mark.parametrize(("factor", "code", "word"), [(1.05, 1, "worse"), (0.95, 0, "better")])
def test_a_planted_change_of_5_percent_is_told_and_sets_the_exit_code(
    factor: float, code: int, word: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "rows.jsonl"

    def measured(*factors: float) -> Any:
        """A stand-in for the clock: the same noise, each case with its factor."""
        rng = np.random.default_rng(0)
        shown = dict.fromkeys(("median_ms", "min_ms", "max_ms", "tokens_per_sec"), 1.0)
        found = [{**shown, "repeats_ms": repeats(rng, factor=factor)} for factor in factors]
        return lambda cases, device, repeats: found

    monkeypatch.setattr(bench, "measure", measured(1, 1))
    assert run("operator", "--out", str(path), "--commit", "0123456789") == 0
    assert run("operator", "--baseline", str(path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 worse, 0 better, 2 noise"
    monkeypatch.setattr(bench, "measure", measured(1, factor))
    assert run("operator", "--baseline", str(path)) == code
    forward, backward, counts = capsys.readouterr().out.splitlines()[-3:]
    assert forward.startswith("operator, forward: noise, +0.0 % [")
    assert f"with backward: {word}, 5.0 % " in backward and ", against 0123456 of 2" in backward
    assert f"1 {word}" in counts and "1 noise" in counts
    assert run("operator", "--baseline", str(path), "--least", "6") == 0


def test_a_file_serves_as_baseline_and_takes_the_new_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    assert run("loader", "--out", str(path)) == 0
    assert run("loader", "operator", "--out", str(path), "--baseline", str(path)) in (0, 1)
    shown = capsys.readouterr().out
    assert "operator, forward: no row in the baseline\n" in shown
    assert "loader: " in shown and " of 2" in shown
    assert [one["case"] for one in rows_of(path)] == ["loader", *ALL_CASES[:2], "loader"]
    # Other settings: nothing is timed, and the label says what is compared once that is wanted.
    more = ["loader", "--baseline", str(path), "data.order=sequential"]
    assert "settings.order: shuffled -> sequential" in refused(capsys, *more)
    assert run(*more, "--across") in (0, 1)
    assert "[ACROSS settings.order: shuffled -> sequential]" in capsys.readouterr().out


def test_red_parity_times_nothing_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = parity.Result(errors={"y": 3e-2}, absolute={}, finite=True)
    monkeypatch.setattr(parity, "check", lambda *_, **__: wrong)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("something was timed"))
    out = tmp_path / "rows.jsonl"
    said = refused(capsys, "step", "--out", str(out))
    assert said.startswith("error: rotated: parity failed (y off by 3.0e-02")
    assert not out.exists()


def test_a_step_without_a_finite_loss_is_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(loop: bench_cases.StepLoop) -> torch.Tensor:
        loop.loss = torch.tensor(float("nan"))
        return loop.loss

    monkeypatch.setattr(bench_cases.StepLoop, "opt_step", spoilt)
    assert "the loss of an optimizer step is nan" in refused(capsys, "step")


def test_a_decode_that_forgets_its_state_is_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = load_training_config(ROOT / "configs" / "quickstart.yaml")
    model = Mamba3Transformer(settings.model()).eval()
    assert bench_cases.logits_error(model, CPU) < 1e-4
    honest = bench_cases.prefill

    def forgetful(*args: Any, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits, state = honest(*args, **options)
        return logits, [torch.zeros_like(one) for one in state]

    monkeypatch.setattr(bench_cases, "prefill", forgetful)
    assert bench_cases.logits_error(model, CPU) > 2 * bench_cases.LOGITS_LIMIT
    monkeypatch.setattr(bench_cases, "LOGITS_LIMIT", 1e-9)
    assert "decode: single tokens and a whole prompt part by" in refused(capsys, "decode")


def test_bad_input_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "bench 'opertor' is unknown (did you mean 'operator'?)" in refused(capsys, "opertor")
    assert "warmup_step" in refused(capsys, "step", "training.warmup_step=1")
    gone = str(tmp_path / "gone.jsonl")
    assert "gone.jsonl: cannot be read (No such file" in refused(capsys, "--baseline", gone)
    assert "cannot be read" in refused(capsys, "--baseline", str(tmp_path))
    wrong = tmp_path / "rows.jsonl"
    for text in ("hello", "[1]", '{"benchmark": "bench"}', '{"benchmark": "loader"}\n{"a'):
        wrong.write_text(text)
        line = refused(capsys, "--baseline", str(wrong))
        assert f"line {1 + text.count(chr(10))} is no row of measurements" in line
    wrong.write_bytes(b"\xff\xfe\x00")
    assert "is no row of measurements" in refused(capsys, "--baseline", str(wrong))
    assert "got 'fast'" in refused(capsys, "step", "model.ssd_dispatch=fast")
    assert "ENABLE_TRITON_KERNELS" in refused(capsys, "step", "model.ssd_dispatch=triton")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("something was timed"))
    assert "cannot be written" in refused(capsys, "loader", "--out", str(tmp_path))


def test_rows_of_other_benchmarks_are_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bench_rows.append(path, [{"benchmark": "loader", "case": "loader"}, row()])
    assert bench_rows.read(path) == [row()]
    path.write_text("")
    assert bench_rows.read(path) == []


# What is timed ------------------------------------------------------------------------------------


def test_every_repeat_goes_through_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEAT_MS", 0.0)
    called: list[str] = []

    def case(name: str) -> bench_cases.Case:
        work = bench_cases.Work(lambda: called.append(name), tokens=5, units=2)
        return bench_cases.Case(name, {}, lambda stack: work)

    found = bench.measure([case("a"), case("b")], CPU, 2)
    runs = [(name, len(list(group))) for name, group in itertools.groupby(called)]
    warm, block = 1 + 2 * bench.WARM_UP_CALLS, 1 + bench.FEWEST_CALLS
    assert runs == [("a", warm), ("b", warm), *[("a", block), ("b", block)] * 2]
    assert [len(one["repeats_ms"]) for one in found] == [2, 2]


def test_a_repeat_is_the_median_of_its_calls_for_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEAT_MS", 40.0)
    monkeypatch.setattr(bench, "milliseconds", lambda call, calls, device: [8.0] * calls)
    work = bench_cases.Work(lambda: None, tokens=6, units=2)
    (found,) = bench.measure([bench_cases.Case("a", {}, lambda stack: work)], CPU, 3)
    assert found["calls_a_repeat"] == 5 and found["repeats_ms"] == [4.0] * 3
    assert found["tokens_per_sec"] == 1500 and found["peak_mem_gib"] is None


def test_milliseconds_are_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    waits = iter([0.02, 0.0, 0.5])
    monkeypatch.setattr(bench_cases.time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += next(waits)

    assert bench_cases.milliseconds(call, 3, CPU) == pytest.approx([20, 0, 500])


@pytest.mark.parametrize("path", ["rotated", "pytorch"])
def test_the_operator_of_any_shape_gives_every_gradient(path: str) -> None:
    operator = bench_cases.Operator(path, 2, 37, 3, 8, 4, 16)
    leaves, dy = operator.draw(CPU, 0)
    assert operator.forward(leaves, dy).shape == dy.shape == (2, 37, 3, 8)
    gradients = operator.both(leaves, dy)
    assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]
    assert all(g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize("documents", [False, True])
def test_the_step_is_a_real_one_of_the_configuration(tmp_path: Path, documents: bool) -> None:
    settings = config(tmp_path, document_mode=documents)
    loop = bench_cases.StepLoop(settings, CPU)
    before = [p.detach().clone() for p in loop.model.parameters()]
    losses = [float(loop.opt_step()) for _ in range(6)]
    loop.settle()
    assert loop.opt_steps == 6 and losses[-1] < losses[0]
    assert not any(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert (loop.segments is not None) == documents


def test_the_plan_follows_the_configuration(tmp_path: Path) -> None:
    settings = config(tmp_path, num_workers=1, data_order="sequential")
    cases, backend = bench_cases.plan(settings, CPU, ["loader"])
    assert backend is None and cases[0].settings["num_workers"] == 1
    cases, backend = bench_cases.plan(settings, CPU, ["step", "decode"])
    assert backend == "rotated" and len(cases) == 5
    assert cases[0].settings["micro_batch_size"] == 3
    assert cases[0].settings["chunk_size"] == MODEL["chunk_size"]
    assert "grad_checkpoint" in cases[0].settings and "grad_checkpoint" not in cases[1].settings


def test_it_runs_from_any_folder_with_the_package_alone(tmp_path: Path) -> None:
    """As installed: nothing of the checkout but the package is on the path."""
    (tmp_path / "mamba3_lite").symlink_to(ROOT / "mamba3_lite")
    done = subprocess.run(
        [sys.executable, "-m", "mamba3_lite.cli", "bench", "loader", *TINY, "--repeats", "2"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "loader" in done.stdout and "benchmarks" not in done.stdout
