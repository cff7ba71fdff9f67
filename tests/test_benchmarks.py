"""What of the benchmarks a machine without a GPU can check: arithmetic, refusals, statistics."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mamba3_lite.measure import parity
from tests import runs

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import loss_curves
import many_gpus
import plots
import rows
import ssd_operator
from ssd_operator import Case

BENCHMARKS = Path(ssd_operator.__file__).parent
ROOT = BENCHMARKS.parent
PEERS = """\
compiling
official Mamba-2 SSD C=64             forward   0.810 ms  forward+backward   4.110 ms
official Mamba-3 SISO groups=16       forward   1.380 ms  forward+backward   3.640 ms
official Mamba-3 SISO groups=1        forward   0.090 ms  forward+backward   0.620 ms
"""


# The operator


def test_floor_is_the_arithmetic_of_the_theory():
    production = Case("fused", *ssd_operator.PRODUCTION)
    token_heads = 16 * 2048 * 16
    forward, both = production.floor_bytes()
    assert (forward, both - forward) == (770 * token_heads, 1412 * token_heads)
    forward, both = production.flops()
    assert (forward, both - forward) == (57_344 * token_heads, 131_072 * token_heads)
    wide = Case("rotated", *ssd_operator.PRODUCTION)
    assert wide.floor_bytes() == tuple(2 * n for n in production.floor_bytes())


def test_rates_and_floor_of_a_measured_time():
    case = Case("fused", *ssd_operator.PRODUCTION)
    times = {"eager_ms": {"median": 0.5}, "graph_ms": {"median": 0.168}}
    shown = ssd_operator.achieved(times, case.floor_bytes()[0], case.flops()[0], "NVIDIA H200")
    assert shown["floor_ms"] == 0.0841 and shown["times_floor"] == 2.0
    assert shown["gb_per_sec"] == pytest.approx(403.7 / 0.168, abs=1)
    assert shown["tflop_per_sec"] == pytest.approx(30.06 / 0.168, abs=0.5)
    compute_bound = ssd_operator.achieved(times, 1, 989 * 10**9, "NVIDIA H200")
    assert compute_bound["floor_ms"] == 1.0
    unknown = ssd_operator.achieved({"eager_ms": {"median": 1.0}}, 10**9, 1, "Abacus 3000")
    assert unknown["gb_per_sec"] == 1000 and "floor_ms" not in unknown


def test_shapes_cover_what_is_asked_and_leave_plain_paths_out_where_they_crawl():
    assert {length for _, length in ssd_operator.SHAPES} >= {2048, 32768, 1 << 20}
    assert {batch for batch, _ in ssd_operator.SHAPES} >= {1, 2, 4, 8, 16, 32, 64}
    slow = [shape for shape in ssd_operator.SHAPES if Case("pytorch", *shape).too_slow]
    assert ssd_operator.PRODUCTION not in slow and (64, 2048) in slow and (1, 1 << 20) in slow
    assert not any(Case("fused", *shape).too_slow for shape in ssd_operator.SHAPES)
    assert ssd_operator.arguments(["--out", "x", "--shape", "2:64", "1:7"]).shape == [
        (2, 64), (1, 7),
    ]  # fmt: skip
    for wrong in ("0:5", "5", "a:b"):
        with pytest.raises(SystemExit):
            ssd_operator.arguments(["--out", "x", "--shape", wrong])


def test_a_case_gives_every_gradient():
    case = Case("rotated", 2, 70)
    leaves, dy = case.draw(torch.device("cpu"), 0)
    y = case.forward(leaves, dy)
    assert y.shape == dy.shape == (2, 70, 16, 64) and not y.requires_grad
    gradients = case.both(leaves, dy)
    assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]
    assert all(g.abs().sum() > 0 for g in gradients)
    (proj, *_), dy = Case("fused", 2, 70).draw(torch.device("cpu"), 0)
    assert proj.shape == (2, 70, 5136) and proj.dtype == dy.dtype == torch.bfloat16


def test_red_parity_prints_nothing_and_writes_nothing(tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.jsonl"
    wrong = parity.Result(errors={"y": 3e-2}, absolute={}, finite=True)
    monkeypatch.setattr(parity, "check", lambda *_, **__: wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["ssd_operator.py", "--out", str(out), "--peer", "none.py"])
    with pytest.raises(SystemExit, match="fused: parity failed .*y off by 3.0e-02"):
        ssd_operator.main()
    assert capsys.readouterr().out == "" and not out.exists()


def test_peer_runs_with_its_path_and_its_numbers_are_kept(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "the_peer.py").write_text(f"LINES = {PEERS!r}")
    script = tmp_path / "peer.py"
    script.write_text("import the_peer\nprint(the_peer.LINES)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = ssd_operator.run_peer(str(script), str(tmp_path / "library"))
    assert found["printed"] == PEERS.splitlines() and len(found["times_ms"]) == 3
    row = {
        "forward": {"eager_ms": {"median": 0.405}, "graph_ms": {"median": 0.2025}},
        "forward_backward": {"eager_ms": {"median": 0.91}},
    }
    better = ssd_operator.versus_better_peer(row, found["times_ms"])
    # Shared B and C are less work: the fastest line of all is no yardstick.
    assert better["forward"]["peer"] == "official Mamba-2 SSD C=64"
    assert better["forward"]["times_faster"] == {"eager": 2.0, "graph": 4.0}
    assert better["forward_backward"]["peer"] == "official Mamba-3 SISO groups=16"
    assert better["forward_backward"]["times_faster"] == {"eager": 4.0}


def test_a_peer_that_fails_or_says_no_time_ends_the_run(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text("import a_module_that_is_not_there")
    with pytest.raises(SystemExit, match="a_module_that_is_not_there"):
        ssd_operator.run_peer(str(script), None)
    script.write_text("print('fast')")
    with pytest.raises(SystemExit, match="printed no times"):
        ssd_operator.run_peer(str(script), None)


# The loss curves


def noise(n: int, memory: float, seed: int) -> np.ndarray:
    """A series of unit variance whose neighbours correlate by ``memory``."""
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal()]
    for _ in range(n - 1):
        values.append(memory * values[-1] + (1 - memory**2) ** 0.5 * rng.standard_normal())
    return np.array(values)


@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_standard_error_knows_of_autocorrelation(memory):
    series = [noise(400, memory, seed) for seed in range(100)]
    truth = np.std([s.mean() for s in series])
    estimates = [loss_curves.standard_error(s) for s in series]
    naive = 1 / 400**0.5
    # The largest of several noisy estimates is a little too large, never far too small.
    assert 0.85 * truth < np.median(estimates) < 1.6 * truth
    if memory:
        assert np.median(estimates) > 2 * naive


def curves(bias: float) -> dict[str, dict[int, loss_curves.Curve]]:
    """Two dispatches, three seeds 0.02 nat apart; the second is biased after step 1500."""
    found: dict[str, dict[int, loss_curves.Curve]] = {"pytorch": {}, "fused": {}}
    common = 0.05 * noise(400, 0.5, 99)
    for seed in range(3):
        for dispatch in found:
            own = 1e-3 * noise(400, 0.5, seed + 10 * len(dispatch))
            found[dispatch][seed] = {
                5 * (i + 1): 4 + 0.02 * seed + common[i] + own[i]
                + (bias if dispatch == "fused" and i >= 300 else 0)
                for i in range(400)
            }  # fmt: skip
    return found


def test_the_same_training_is_met_and_a_biased_one_is_not():
    same = loss_curves.compare(curves(0.0), 500)
    assert same["met"] and same["largest_nat"] < 1e-3
    assert same["compared_opt_steps"] == [1505, 2000] and same["compared_rows"] == 100
    assert same["spread_nat"]["pytorch"] == pytest.approx(0.04, abs=2e-3)
    assert 2e-5 < same["standard_error_nat"] < 4e-4
    biased = loss_curves.compare(curves(-0.011), 500)
    assert not biased["met"] and biased["mean_nat"] == pytest.approx(-0.011, abs=5e-4)
    row = {**biased, "opt_steps": 2000, "reference": "pytorch", "candidate": "fused"}
    assert loss_curves.in_words(row).startswith("NOT met: from optimizer step 1505 to 2000 of 2000")


def test_one_seed_off_is_enough_and_so_is_no_spread():
    found = curves(0.0)
    found["fused"][1] = {s: loss + 0.02 for s, loss in found["fused"][1].items()}
    found["fused"][2] = {s: loss - 0.02 for s, loss in found["fused"][2].items()}
    result = loss_curves.compare(found, 500)
    assert abs(result["mean_nat"]) < 1e-3 and not result["met"]
    alone = {dispatch: {0: seeds[0]} for dispatch, seeds in curves(0.0).items()}
    assert not loss_curves.compare(alone, 500)["met"]


def test_runs_that_end_early_are_compared_where_all_have_rows():
    found = curves(0.0)
    found["fused"][2] = {s: loss for s, loss in found["fused"][2].items() if s <= 1700}
    assert loss_curves.compare(found, 500)["compared_opt_steps"] == [1205, 1700]
    found["fused"][2] = {2003: 1.0}
    with pytest.raises(SystemExit, match="fewer than two rows"):
        loss_curves.compare(found, 500)


def test_settings_are_valid_and_the_model_has_the_size_asked_for(tmp_path):
    import yaml

    from mamba3_lite.models.arithmetic import parameter_count
    from mamba3_lite.training.config import load_training_config

    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(loss_curves.settings(tmp_path, None, 2000)))
    run, _ = load_training_config(config)
    assert 15e6 < parameter_count(run.model()) < 30e6 and run.max_seq_len == 2048
    assert run.max_steps == 2000 and run.max_steps % run.log_every == 0
    assert run.data_order == "shuffled"


def test_a_window_that_was_dropped_refuses_the_curve(tmp_path):
    row = {"kind": "train", "opt_step": 1, "loss": 2.0, "dropped_windows": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit, match="dropped 1 windows"):
        loss_curves.curve(tmp_path)


SMALL = [
    f"model.vocab_size={runs.VOCAB}", "model.d_model=8", "model.n_layers=1", "model.n_heads=1",
    "model.head_dim=8", "model.state_dim=4", "model.ffn_dim=8", "model.max_seq_len=16",
    "training.warmup_steps=1", "training.log_interval=1", "training.compile=false",
]  # fmt: skip


def test_short_runs_from_shards_to_row_and_picture(tmp_path, monkeypatch, capsys):
    data = runs.write_tokens(tmp_path / "train.bin", 600)
    out, picture = tmp_path / "rows.jsonl", tmp_path / "curves.png"
    monkeypatch.setattr(
        sys, "argv",
        [
            "loss_curves.py", "--data", data, "--out", str(out), "--dispatch",
            "pytorch", "rotated", "--seeds", "3", "--opt-steps", "4", "--last", "2", "--jobs", "2",
            "--commit", "abc", "--", *SMALL,
        ],
    )  # fmt: skip
    loss_curves.main()
    (row,) = rows.read(out)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == row["verdict"]
    assert row["compared_opt_steps"] == [3, 4] and row["largest_nat"] < 1e-4
    assert [s for s, _ in row["curves"]["rotated"]["3"]] == [1, 2, 3, 4]
    assert row["environment"]["git"]["commit"] == "abc" and row["data"]["tokens"] == 600
    arguments = ["loss_curves.py", "--plot-only", str(out), "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", arguments)
    loss_curves.main()
    assert picture.read_bytes().startswith(b"\x89PNG") and len(rows.read(out)) == 1


def test_a_run_that_fails_ends_the_others_with_its_own_words(tmp_path):
    commands = {
        "good": [sys.executable, "-c", "import time; time.sleep(600)"],
        "bad": [sys.executable, "-c", "raise SystemExit('no such data')"],
    }
    with pytest.raises(SystemExit, match="the run bad failed:\nno such data"):
        loss_curves.train(commands, tmp_path, 2)


# Rows, pictures and the page


def operator_row(path: str, batch: int, length: int) -> dict:
    one_pass = {"eager_ms": {"median": 0.5}, "gb_per_sec": 1000.0}
    return {
        "benchmark": "ssd_operator", "path": path, "batch": batch, "seq_len": length,
        "copy_gb_per_sec": 4200.0, "forward": one_pass, "forward_backward": one_pass,
    }  # fmt: skip


def test_operator_picture_holds_every_point_and_peer():
    from matplotlib.figure import Figure

    found = [operator_row("fused", *shape) for shape in ssd_operator.SHAPES]
    found[-3]["forward_backward"] = None
    times = {"forward": 0.8, "forward_backward": 4.0}
    found[0]["peers"] = {"times_ms": {"official": times}}
    found.append(operator_row("pytorch", 16, 2048))
    figure = Figure()
    plots.ssd_operator(found, figure)
    by_length, by_batch, bars = figure.axes
    assert list(by_length.lines[0].get_xdata()) == [
        2048, 4096, 8192, 16384, 32768, 131072, 524288, 1048576,
    ]  # fmt: skip
    assert [len(line.get_xdata()) for line in by_batch.lines[:2]] == [7, 6]
    names = [label.get_text() for label in bars.get_yticklabels()]
    assert names == ["fused", "pytorch", "official"]
    assert [bar.get_width() for bar in bars.patches] == [0.5, 0.5, 0.8, 0.5, 0.5, 4.0]


def test_pictures_without_matplotlib_and_of_unknown_rows(tmp_path, monkeypatch, capsys):
    results, picture = tmp_path / "rows.jsonl", tmp_path / "p.png"
    rows.append(results, {"benchmark": "loader", "long": 1}, {}, hide=("long",))
    assert json.loads(capsys.readouterr().out) == {"benchmark": "loader"}
    assert rows.read(results)[0]["long"] == 1
    with pytest.raises(SystemExit, match="no picture is known for 'loader'"):
        plots.draw(results, picture)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plots.draw(results, picture)
    assert "no matplotlib" in capsys.readouterr().err and not picture.exists()


# Many GPUs


def logged(paces: list[float], *, every: int = 2) -> list[dict[str, float]]:
    """Log rows of ``every`` optimizer steps that took so many seconds each."""
    times = np.cumsum([every * pace for pace in paces])
    return [
        {"opt_step": every * (i + 1), "time": 100.0 + t, "tps": 1000 / pace}
        for i, (t, pace) in enumerate(zip(times, paces, strict=True))
    ]


def test_the_cost_of_a_save_is_what_the_loop_lost_behind_it():
    rows_of_a_run = logged([9.0, 1.0, 1.0, 1.1, 1.0, 1.5, 1.2, 1.0])
    assert many_gpus.save_cost(rows_of_a_run, 1, 10) == pytest.approx(2 * (0.5 + 0.2))
    assert many_gpus.save_cost(logged([1.0] * 8), 1, 10) == pytest.approx(0)
    with pytest.raises(SystemExit, match="more log rows"):
        many_gpus.save_cost(rows_of_a_run, 4, 10)
    found = many_gpus.speed(rows_of_a_run, 1)
    assert found["tokens_per_sec"] == 1000 and found["min_tokens_per_sec"] == 667


def test_ranks_are_timed_beside_one_process_without_torchrun(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [
        sys.executable, many_gpus.__file__, "--config", "configs/debug_cpu.yaml", "--ranks", "2",
        "--modes", "fsdp", "--opt-steps", "12", "--row", "1", "--skip", "1", "--save",
        "--out", str(out), "model.n_layers=1", "training.micro_batch_size=1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, ranks = rows.read(out)
    assert (alone["mode"], alone["ranks"], alone["efficiency"]) == ("alone", 1, 1.0)
    assert (ranks["mode"], ranks["ranks"], ranks["rows"]) == ("fsdp", 2, 11)
    assert (
        0 < ranks["efficiency"] == round(ranks["tokens_per_sec"] / (2 * alone["tokens_per_sec"]), 4)
    )
    assert ranks["least_peak_mem_gib"] <= ranks["peak_mem_gib"] and "save_share" in ranks
    assert alone["environment"]["command"].startswith("python ")


def test_a_run_that_fails_ends_the_benchmark_with_what_it_said(tmp_path):
    command = [
        sys.executable, many_gpus.__file__, "--config", "configs/debug_cpu.yaml",
        "--out", str(tmp_path / "rows.jsonl"), "model.ssd_dispatch=fused",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "alone-1 failed:" in done.stderr
    assert "error: " in done.stderr and not (tmp_path / "rows.jsonl").exists()


def test_every_command_of_the_page_is_one():
    page = (BENCHMARKS / "README.md").read_text()
    commands = re.findall(r"^python benchmarks/(\w+\.py)(.*)$", page, flags=re.MULTILINE)
    assert {name for name, _ in commands} == {
        p.name for p in BENCHMARKS.glob("*.py") if p.name != "rows.py"
    }
    for name, rest in commands:
        source = (BENCHMARKS / name).read_text()
        for flag in re.findall(r"--[\w-]+", rest):
            assert f'"{flag}"' in source, f"{name} has no {flag}"


def test_the_guide_to_many_gpus_has_its_figures_from_recorded_rows():
    page = (ROOT / "docs" / "guides" / "many_gpus.md").read_text(encoding="utf-8")
    found = rows.read(ROOT / "benchmarks" / "results" / "many_gpus.jsonl")
    names = {"alone": "without torchrun", "ddp": "`ddp`", "fsdp": "`fsdp`"}
    for row in found:
        spread = "({min_tokens_per_sec:,} to {max_tokens_per_sec:,})".format(**row)
        speed = f"{row['tokens_per_sec']:,} {spread}"
        memory, commit = f"{row['peak_mem_gib']:.1f}", row["environment"]["git"]["commit"][:7]
        assert f"| {names[row['mode']]} | {speed} | {memory} | {commit} |" in page
        assert row["ranks"] == 1 and abs(row["efficiency"] - 1) < 0.02
        if "save_sec" in row:
            assert f"costs {row['save_sec']:.1f} s" in page and f"{row['save_share']:.1%}" == "0.6%"
    assert len(re.findall(r"\| [\d,]+ \([\d,]+ to [\d,]+\) \|", page)) == len(found)
    # One rank has nothing to cut, and the page says how one sees that the model is the plain one.
    alone, fsdp = found[-2:]
    assert (alone["mode"], fsdp["mode"]) == ("alone", "fsdp")
    assert all(alone[name] == fsdp[name] for name in ("losses", "peak_mem_gib"))
