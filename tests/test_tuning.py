"""The Tuning Guide: its figures against the rows, and the benchmarks that make them."""

import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.measure import bench_cases, budget
from mamba3_lite.measure.stats import Estimate
from mamba3_lite.training.config import TrainingConfig
from tests import runs

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import loss_curves
import plots
import rows
import training_step
import tuning
import tuning_curves
import tuning_plan
from training_step import Variant

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "tuning.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCUMENTS += [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


# The page against the rows ------------------------------------------------------------------------


def rendered(page: str) -> str:
    comparisons = {name: tuning.recorded(path) for name, path in tuning.AB_TABLES.items()}
    return tuning.render(
        page, tuning.recorded(tuning.STEPS), tuning.recorded(tuning.CURVES), comparisons
    )


def test_every_table_is_that_of_the_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page
    blocks = [found[2] for found in tuning.BLOCK.finditer(page)]
    assert sorted(blocks) == sorted([*tuning.TABLES, *tuning.CURVE_TABLES, *tuning.AB_TABLES])
    assert page.count("<!-- rows: ") == page.count("<!-- end of rows -->") == len(blocks)


def test_a_changed_figure_is_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    figures = [
        figure
        for found in tuning.BLOCK.finditer(page)
        for figure in re.finditer(r"(?<![\w.,])\d[\d,.]*\d", found[0])
        for figure in [(found.start() + figure.start(), figure[0])]
    ]
    assert len(figures) > 50  # of the rows recorded so far
    for where, figure in figures:
        last = where + len(figure) - 1
        planted = page[:last] + str((int(page[last]) + 1) % 10) + page[last + 1 :]
        assert planted != page and rendered(planted) == page


def test_a_changed_row_is_found() -> None:
    steps, changes = tuning.recorded(tuning.STEPS), 0
    for name, table in tuning.TABLES.items():
        shown = tuning.chosen([entry.variant for entry in table.entries], steps)
        for text, row in shown.items():
            if tuning.timed(row):
                changed = {**row, "tokens_per_sec": row["tokens_per_sec"] + 1}
                others = [changed if one is row else one for one in steps]
                found = tuning.step_block(name, others)
                assert found != tuning.step_block(name, steps), (name, text)
                changes += 1
    assert changes > 30


def test_a_table_of_an_unknown_name_ends_the_program() -> None:
    with pytest.raises(SystemExit, match="no table is called 'speed'; known: dispatch, "):
        tuning.render("<!-- rows: speed -->\n<!-- end of rows -->", [], [], {})


def test_no_measured_figure_stands_outside_a_table() -> None:
    page = tuning.BLOCK.sub("", PAGE.read_text(encoding="utf-8"))
    page = re.sub(r"^```.*?^```$|^>.*?$", "", page, flags=re.MULTILINE | re.DOTALL)
    assert "The seed guide: 32 about as fast" not in page and "## chunk_size" in page
    units = r"\d\s?(%|GiB|MiB|GB|ms\b|µs|s\b|seconds|minutes|tok/s|nat\b|times\b)"
    assert re.search(units, "5 % faster") and re.search(units, "183 ms")
    assert re.findall(rf".*{units}.*", page) == []


def test_nothing_in_the_project_is_marked_as_inferred() -> None:
    mark = "[" + "INFERENCE" + "]"
    sources = [*(ROOT / "mamba3_lite").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    found = [p for p in [*DOCUMENTS, *sources] if mark in p.read_text(encoding="utf-8")]
    assert found == []


# Tables from rows ---------------------------------------------------------------------------------


def environment(commit: str = "abcdef123456", boot: str = "one") -> dict[str, Any]:
    return {
        "torch": "2.11.0", "triton": "3.6.0", "gpus": [{"name": "NVIDIA H200"}], "boot": boot,
        "git": {"commit": commit, "dirty": False}, "command": f"python x.py {boot}",
    }  # fmt: skip


def step_row(text: str, ms: float = 100.0, gib: float = 40.0, **more: Any) -> dict[str, Any]:
    variant = Variant.parse(text)
    rate = round(1e3 * variant.tokens / ms)
    return {
        "benchmark": "training_step", **variant.settings, "median_ms": ms, "min_ms": ms - 0.5,
        "max_ms": ms + 0.5, "timed_opt_steps": 5, "tokens_per_sec": rate,
        "first_step_sec": 12.34, "compile_cache_hits": 0, "peak_mem_gib": gib,
        "environment": environment(), **more,
    }  # fmt: skip


def lines_of(block: str) -> dict[str, list[str]]:
    """The other cells of each line, by its first."""
    found = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
    return {first: [cell.strip() for cell in rest] for first, *rest in found}


def test_a_whole_table_with_its_verdicts() -> None:
    base = tuning_plan.ROTATED
    found = [
        step_row(base, 500, 110), step_row(f"{base}:chunk=32", 495, 128),
        step_row(f"{base}:chunk=128", 465, 107), step_row(f"{base}:chunk=256", 400, 116),
    ]  # fmt: skip
    lines = lines_of(tuning.step_block("chunk_size", found))
    assert lines["`rotated`, 128"] == [
        "465 (464 to 466)", "70,469", "+7.5 %", "107.0", "12.3", "abcdef1",
    ]  # fmt: skip
    assert lines["`rotated`, 64"][2] == "" and lines["`pytorch`, 32"][0] == "not measured yet"
    assert lines["`rotated`, 32: about as fast as 64, taken as ± 2 %"] == ["+1.0 %", "yes"]
    assert lines["`rotated`, 128: +5 to +10 %"] == ["+7.5 %", "yes"]
    assert lines["`rotated`, 256: +10 to +15 %"] == ["+25.0 %", "no, more"]
    (memory,) = [line for says, line in lines.items() if "L of 128" in says]
    assert memory == ["-0.11 GiB a layer", "no, less"]
    assert "`triton`, 128: +5 to +10 %" not in lines


def test_a_difference_inside_the_spread_holds_no_direction() -> None:
    found = [step_row("fused:default:0", 180), step_row("fused:max-autotune:0", 179.8)]
    lines = lines_of(tuning.step_block("compile", found))
    expected = "`fused`: max-autotune is faster than default"
    assert lines[expected] == ["+0.1 %, inside the spread", "not shown"]
    found[1] = step_row("fused:max-autotune:0", 190)
    lines = lines_of(tuning.step_block("compile", found))
    assert lines[expected] == ["-5.3 %", "no, less"]


def test_rows_of_another_run_are_shown_but_not_compared() -> None:
    other = {"environment": environment(boot="two")}
    found = [step_row(tuning_plan.TRITON), step_row(f"{tuning_plan.TRITON}:warps=8", 90, **other)]
    block = tuning.step_block("launch", found)
    assert lines_of(block)["1, 8"][:3] == ["90 (90 to 90)", "364,089", "another run"]
    # One process after another on one machine does compare: the command is no part of it.
    again = {"environment": {**environment(), "command": "another"}}
    found[1] = step_row(f"{tuning_plan.TRITON}:warps=8", 80, **again)
    assert lines_of(tuning.step_block("launch", found))["1, 8"][2] == "+25.0 %"


def test_a_table_takes_the_rows_of_one_machine_as_far_as_it_can() -> None:
    on, off, selective = (f"fused:default:{how}" for how in ("1", "0", "selective"))
    later = {"environment": environment("fedcba9")}
    found = [
        step_row(on, 300), step_row(on, 250), step_row(off, 180), step_row(off, 170, **later),
        {"benchmark": "transformer_peer", "environment": environment()},
    ]  # fmt: skip
    lines = lines_of(tuning.step_block("grad_checkpoint", found))
    assert lines["`fused`, true"][0].startswith("250 ") and lines["`fused`, false"][2] == "+38.9 %"
    found += [step_row(on, 240, **later), step_row(selective, 200, **later)]
    lines = lines_of(tuning.step_block("grad_checkpoint", found))
    assert [lines[f"`fused`, {how}"][-1] for how in ("true", "selective", "false")] == [
        "fedcba9"
    ] * 3


def test_what_did_not_fit_and_what_was_compiled_before_are_marked() -> None:
    lost = {
        "benchmark": "training_step_out_of_memory",
        **Variant.parse("pytorch:default:0").settings,
    }
    found = [
        {**lost, "said": "CUDA out of memory", "environment": environment()},
        step_row("pytorch:default:1", compile_cache_hits=3), step_row("fused:default:0"),
    ]  # fmt: skip
    block = tuning.step_block("grad_checkpoint", found)
    lines = lines_of(block)
    assert lines["`pytorch`, false"] == ["out of memory", "", "", "", "", "abcdef1"]
    assert (
        lines["`pytorch`, true"][4] == "12.3 (cache warm)" and lines["`fused`, false"][4] == "12.3"
    )
    assert "`pytorch`: false is 25 to 30 % faster" not in lines
    assert "One NVIDIA H200, torch 2.11.0, triton 3.6.0; medians" in block
    assert tuning.step_block("launch", found) == tuning.NOT_YET


# Comparisons --------------------------------------------------------------------------------------


def test_the_commands_of_the_comparisons_are_those_of_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path in tuning.AB_TABLES.values():
        for experiment in tuning.recorded(path)[:1]:
            command, _, _ = experiment["command"].partition(" --out ")
            assert f"{command}\n" in page


def test_a_comparison_of_timed_micro_steps_decides_speed_and_memory() -> None:
    block = tuning.ab_block(tuning.recorded(tuning.AB_TABLES["ab_speed"]))
    lines = lines_of(block)
    assert lines["`rotated`, 128: +5 to +10 %"] == ["+3.1 % [+2.1, +4.1]", "no, less"]
    (memory,) = [line for says, line in lines.items() if "L of 128" in says]
    assert memory[1] == "no, less" and tuning.SAME_LOSS not in lines
    assert "Verdict: B is 3.1 % faster [2.1, 4.1]; " in block


def test_a_comparison_of_whole_runs_decides_the_loss() -> None:
    found = tuning.recorded(tuning.STEPS.with_name("ab_chunk_size_cpu.jsonl"))
    found[0]["environment"]["gpus"] = [{"name": "NVIDIA H200"}]
    expected = {"undecided": "not shown", "passed": "yes", "failed": "no"}
    for check, shift in (("undecided", 0.0), ("passed", 0.0128), ("failed", 3.0)):
        runs = [
            {**row, "loss": row["loss"] + shift} if row.get("arm") == "B" and "loss" in row else row
            for row in found
        ]
        lines = lines_of(tuning.ab_block(runs))
        assert lines[tuning.SAME_LOSS][-1] == expected[check]
        assert "`rotated`, 128: +5 to +10 %" not in lines
    assert tuning.ab_block([]) == tuning.NOT_YET


@pytest.mark.parametrize(
    ("low", "high", "held"),
    [(1, 4, "no, less"), (4, 6, "not shown"), (6, 9, "yes"), (9, 12, "not shown"),
     (11, 12, "no, more")],
)  # fmt: skip
def test_the_whole_interval_has_to_be_as_predicted(low: float, high: float, held: str) -> None:
    prediction = tuning_plan.Prediction("128 is faster", "b", "a", 5, 10)
    found = Estimate((low + high) / 2, low, high)
    assert tuning.interval_verdict(prediction, found)[-1] == held


# Curves -------------------------------------------------------------------------------------------


def curve_row(name: str, offset: float = 0.0, **more: Any) -> dict[str, Any]:
    wave = [0.01 * (i % 7) for i in range(400)]
    curve = [[5 * (i + 1), 4 + offset + wave[i] + 0.001 * offset * (i % 3)] for i in range(400)]
    return {
        "benchmark": "tuning_curve", "name": name, "curve": curve, "val_loss": 4.2 + offset,
        "last_opt_step": 2000, "dropped_windows": 0, "events": {}, "ended": "finished",
        "parameters": 16_280_080, "opt_steps": 2000, "tokens_per_opt_step": 8192,
        "environment": environment(), **more,
    }  # fmt: skip


def test_curves_are_compared_with_the_base_over_the_last_steps() -> None:
    found = [curve_row("base"), curve_row("lr 6e-4", -0.05), curve_row("lr 1.5e-4", 0.2)]
    found.append(curve_row("lr 1e-2", ended="failed: gave up", last_opt_step=180, val_loss=None,
                           dropped_windows=6, events={"spike": 2}, curve=[]))  # fmt: skip
    block = tuning.curve_block("lr", found)
    lines = lines_of(block)
    assert lines["3e-4"][0] == "4.031" and lines["3e-4"][1] == "" and lines["3e-4"][2] == "4.200"
    assert lines["6e-4"][1].startswith("-0.050 ± 0.000") and lines["6e-4"][3] == "-0.050"
    assert lines["1e-2"] == ["", "", "", "", "6 dropped, 2 spikes", "failed at 180"]
    assert lines["1.2e-3"][0] == "not measured yet"
    dropped = curve_row("lr 1.2e-3", dropped_windows=390)
    dropped["curve"] = dropped["curve"][:10]  # nothing finite is left where losses count
    lines_then = lines_of(tuning.curve_block("lr", [*found, dropped]))
    assert lines_then["1.2e-3"] == ["", "", "", "", "390 dropped, 0 spikes", "finished"]
    assert lines["a rate far too high (1e-2) shows as `[nan-guard]` lines"] == [
        "6 windows dropped", "yes",
    ]  # fmt: skip
    assert "16.3 M parameters, 2,000 optimizer steps of 8,192 tokens" in block
    assert f"]({tuning.PICTURE})" in block
    assert tuning.curve_block("chunk_loss", found) == tuning.NOT_YET


def test_a_run_that_was_cut_short_is_compared_where_all_have_rows() -> None:
    short = curve_row("warm-up 500", 0.1, ended="out of time", last_opt_step=1500, val_loss=None)
    short["curve"] = short["curve"][:300]
    found = [curve_row("base"), curve_row("warm-up 0", 0.03), short]
    lines = lines_of(tuning.curve_block("warmup", found))
    assert lines["500"][1].startswith("+0.100") and lines["500"][2:4] == ["", ""]
    assert lines["500"][-1] == "until 1,500" and lines["0"][-1] == "finished"
    assert lines["warmup_steps"][0] == "training loss to 1,500"
    expected = "without warm-up the loss is higher than with it"
    assert lines[expected][0].startswith("+0.030 ±") and lines[expected][1] == "yes"


@pytest.mark.parametrize(("offset", "held"), [(0.019, "yes"), (-0.03, "no")])
def test_the_loss_of_a_chunk_size_is_held_to_what_a_seed_makes(offset: float, held: str) -> None:
    found = [
        curve_row("base"), curve_row("seed 1", 0.02), curve_row("chunk 64"),
        curve_row("chunk 128", offset),
    ]  # fmt: skip
    lines = lines_of(tuning.curve_block("chunk_loss", found))
    measured, verdict = lines["the loss of 128 is that of 64 within noise"]
    assert measured.endswith("nat; two seeds differ by 0.020") and verdict == held


def test_the_picture_has_a_panel_for_each_knob(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    found = [curve_row(name, 0.1 * i) for i, name in enumerate(tuning_curves.RUNS)]
    figure = Figure()
    plots.tuning_curves(found, figure)
    drawn = [[line.get_label() for line in axes.lines] for axes in figure.axes]
    assert {name for panel in drawn for name in panel} == set(tuning_curves.RUNS)
    assert all(panel[0] == "base" for panel in drawn)
    points = figure.axes[0].lines[0].get_xdata()
    assert (len(points), points[0], points[-1]) == (40, 50, 2000)
    rows.append(tmp_path / "rows.jsonl", curve_row("base"), {}, hide=tuple(found[0]))
    plots.draw(tmp_path / "rows.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_runs_differ_from_the_base_as_their_names_say() -> None:
    assert {name for table in tuning.CURVE_TABLES.values() for _, name in table.lines} == set(
        tuning_curves.RUNS
    )
    assert {table.reference for table in tuning.CURVE_TABLES.values()} <= set(tuning_curves.RUNS)
    keys = {
        "lr": "training.lr",
        "warmup": "training.warmup_steps",
        "floor": "training.min_lr_ratio",
    }
    for table, key in keys.items():
        for label, name in tuning.CURVE_TABLES[table].lines:
            assert {**tuning_curves.BASE, **tuning_curves.RUNS[name]}[key] == float(label)
            assert set(tuning_curves.RUNS[name]) <= {key}
    for label, name in tuning.CURVE_TABLES["chunk_loss"].lines:
        assert tuning_curves.RUNS[name]["model.chunk_size"] == int(label)


SMALL = [
    f"model.vocab_size={runs.VOCAB}", "model.d_model=8", "model.n_layers=1", "model.n_heads=1",
    "model.head_dim=8", "model.state_dim=4", "model.ffn_dim=8", "model.max_seq_len=16",
    "training.log_interval=1", "training.compile=false", "training.warmup_steps=1",
    "model.ssd_dispatch=rotated",
]  # fmt: skip


def test_every_run_has_its_row_even_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = runs.write_tokens(tmp_path / "train.bin", 600), tmp_path / "rows.jsonl"
    monkeypatch.setitem(tuning_curves.RUNS, "bad", {"training.beta2": 2})
    monkeypatch.setattr(
        sys, "argv",
        [
            "tuning_curves.py", "--data", data, "--val-data", data, "--only", "bad", "lr 6e-4",
            "--opt-steps", "4", "--jobs", "2", "--max-time", "60", "--commit", "abc", "--out",
            str(out), "--", *SMALL,
        ],
    )  # fmt: skip
    tuning_curves.main()
    found = {row["name"]: row for row in rows.read(out)}
    good, bad = found["lr 6e-4"], found["bad"]
    assert good["ended"] == "finished" and good["changed"] == {"training.lr": 6e-4}
    assert [s for s, _ in good["curve"]] == [1, 2, 3, 4] and good["val_loss"] > 1
    assert (good["last_opt_step"], good["dropped_windows"], good["events"]) == (4, 0, {})
    assert good["tokens_per_opt_step"] == 4 * 16 and good["data"]["tokens"] == 600
    assert good["environment"]["git"]["commit"] == "abc"
    assert bad["ended"].startswith("failed: error: ") and "beta2" in bad["ended"]
    assert (bad["curve"], bad["val_loss"], bad["last_opt_step"]) == ([], None, 0)
    assert "curve" not in json.loads(capsys.readouterr().out.splitlines()[0])


def test_losses_that_were_not_finite_and_events_are_kept_apart(tmp_path: Path) -> None:
    logged = [
        {"kind": "train", "opt_step": 5, "loss": 9.123456, "dropped_windows": 0},
        {"kind": "event", "event": "spike"}, {"kind": "event", "event": "spike"},
        {"kind": "train", "opt_step": 10, "loss": None, "dropped_windows": 2},
    ]  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in logged)
    (tmp_path / "metrics.jsonl").write_text(lines)
    found = tuning_curves.outcome(tmp_path)
    assert found["curve"] == [[5, 9.12346]] and found["last_opt_step"] == 10
    assert (found["dropped_windows"], found["events"]) == (2, {"spike": 2})
    (tmp_path / "log").write_text("")
    assert tuning_curves.ending(1, tmp_path / "log") == "failed: "
    assert tuning_curves.ending(75, tmp_path / "log") == "out of time"


def test_closing_ends_the_runs_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen:
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(loss_curves.subprocess, "Popen", popen)
    commands = {
        "long": [sys.executable, "-c", "import time; time.sleep(600)"],
        "short": [sys.executable, "-c", "raise SystemExit(75)"],
    }
    ended = loss_curves.finished(commands, tmp_path, 2)
    name, seconds, code = next(ended)
    assert (name, code) == ("short", 75) and 0 < seconds < 600
    assert started[0].poll() is None
    ended.close()
    assert started[0].returncode == -signal.SIGTERM


# The plan -----------------------------------------------------------------------------------------


def test_the_plan_holds_what_the_tables_show_and_nothing_twice() -> None:
    shown = {entry.variant for table in tuning_plan.TABLES.values() for entry in table.entries}
    assert shown == set(tuning_plan.SECONDS)
    assert len({Variant.parse(text) for text in shown}) == len(shown)
    for table in tuning_plan.TABLES.values():
        here = {entry.variant for entry in table.entries}
        against = {entry.against for entry in table.entries} - {None}
        assert against <= here
        assert {v for p in table.predictions for v in (p.variant, p.against)} <= here


def test_the_plan_is_what_the_guide_has_to_cover() -> None:
    planned = {Variant.parse(text) for text in tuning_plan.SECONDS}
    for dispatch in ("pytorch", "rotated", "triton"):
        assert {32, 64, 128, 256} <= {v.chunk_size for v in planned if v.dispatch == dispatch}
    for dispatch in ("fused", "rotated", "pytorch"):
        ways = {
            v.grad_checkpoint for v in planned if (v.dispatch, v.compile) == (dispatch, "default")
        }
        assert ways == {True, False, "selective"}
    modes = {v.compile for v in planned if v.dispatch == "fused"}
    assert modes == {"eager", "default", "reduce-overhead", "max-autotune"}
    same = {(v.micro_batch, v.grad_checkpoint) for v in planned if v.tokens == 64 * 2048}
    assert same == {(4, False), (8, False), (16, False), (32, False), (32, True), (64, True)}
    assert {v.accumulation for v in planned if v.micro_batch == 16} == {1, 2, 4, 8}
    knobs = {(v.num_stages, v.num_warps) for v in planned if v.dispatch == "triton"}
    assert knobs == {(1, 4), (2, 4), (3, 4), (1, 2), (1, 8)}


def test_what_is_planned_fits_an_h200_but_one_and_the_longest_is_last() -> None:
    h200 = 150_109_880_320
    too_large = [
        text
        for text in tuning_plan.SECONDS
        for variant in [Variant.parse(text)]
        if budget.peak_bytes(variant.config(), variant.dispatch) > h200
    ]
    assert too_large == ["pytorch:default:0"]
    seconds = list(tuning_plan.SECONDS.values())
    assert seconds[-1] == max(seconds) and sum(seconds) + tuning_plan.START_SEC < 1300


def test_what_has_a_row_of_the_commit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "rows.jsonl"
    for text in ("fused:default:0", "pytorch:default:0"):
        row = step_row(text)
        row["benchmark"] += "_out_of_memory" if text.startswith("pytorch") else ""
        rows.append(results, row, row["environment"], hide=tuple(row))
    monkeypatch.setattr(tuning_plan, "STEPS", results)
    every = list(tuning_plan.SECONDS)

    def written(*arguments: str) -> list[str]:
        target = tmp_path / "left.txt"
        monkeypatch.setattr(sys, "argv", ["tuning_plan.py", *arguments, "--write", str(target)])
        tuning_plan.main()
        return target.read_text().splitlines()

    left = [text for text in every if text not in ("fused:default:0", "pytorch:default:0")]
    assert written("--commit", "abcdef1") == left
    assert written("--commit", "1234567") == written() == every
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["tuning_plan.py"])
    tuning_plan.main()
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == every
    assert lines[0].split()[:6] == ["30", "s", "75", "s", "40.5", "GiB"]
    assert total.startswith(f"speed: {tuning_plan.START_SEC + sum(tuning_plan.SECONDS.values())} s")


# Variants and their measurement -------------------------------------------------------------------


def test_a_variant_from_its_text_and_from_a_row_old_or_new() -> None:
    plain = Variant.parse("fused:default:0")
    assert plain == Variant("fused", "default", False)
    full = Variant.parse("triton:eager:selective:chunk=128,batch=8,length=4096,accumulate=2,"
                         "stages=3,warps=8")  # fmt: skip
    assert full == Variant("triton", "eager", "selective", 8, 4096, 128, 2, 3, 8)
    assert full.tokens == 8 * 4096 * 2 and full.kernel == ("triton", 128, 3, 8)
    assert Variant.parse("fused:default:1:batch=4", micro_batch=2, seq_len=64) == Variant(
        "fused", "default", True, 4, 64
    )
    old = {"dispatch": "fused", "compile": "default", "grad_checkpoint": False}
    assert Variant.of({**old, "micro_batch": 1, "seq_len": 32768, "median_ms": 1.0}) == Variant(
        "fused", "default", False, 1, 32768
    )
    for variant in (plain, full):
        assert Variant.of(json.loads(json.dumps(variant.settings))) == variant
    assert "num_warps" not in plain.settings and full.settings["num_warps"] == 8
    config = full.config()
    assert (config.batch_size, config.gradient_accumulation_steps, config.max_seq_len) == (
        8,
        2,
        4096,
    )
    assert not config.compile_model and config.model().chunk_size == 128
    assert config.model().grad_checkpoint == "selective"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fused:default", "'' is none of 0, 1, selective"),
        ("fuse:default:0", "'fuse' is none of pytorch, "),
        ("fused:fast:0", "'fast' is none of eager, default"),
        ("fused:default:2", "'2' is none of 0, 1"),
        ("fused:default:0:chunks=3", "'chunks=3' is no setting; write one of batch, length"),
        ("fused:default:0:batch=0", "'batch=0' is no setting"),
        ("fused:default:0:batch", "'batch' is no setting"),
        ("fused:default:0:warps=8", "stages and warps are of 'triton' alone"),
    ],
)
def test_a_wrong_variant_is_named_before_anything_runs(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        Variant.parse(text)
    monkeypatch.setattr(sys, "argv", ["training_step.py", "--variant", text, "--out", "none"])
    with pytest.raises(SystemExit, match=re.escape(says)):
        training_step.main()


def test_variants_come_in_order_from_arguments_and_a_file(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("# the first\nrotated:default:1:chunk=128  # 30 s\n\npytorch:eager:1\n")
    args = training_step.arguments(
        ["--variant", "fused:default:0", "--variants", str(listed), "--batch", "2", "--out", "x"]
    )
    found = training_step.variants_of(args)
    assert [v.dispatch for v in found] == ["fused", "rotated", "pytorch"]
    assert [v.chunk_size for v in found] == [64, 128, 64] and {v.micro_batch for v in found} == {2}
    assert (args.opt_steps, args.warm_up) == (10, 3)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str, str]]:
    """Lets variants of a tiny model be measured on the CPU; returns the parity checks made."""
    checks = []

    def parity_errors(dispatch: str, device: torch.device, chunk_size: int) -> dict[str, Any]:
        knobs = [training_step.os.environ[name] for name in training_step.LAUNCH_KNOBS.values()]
        checks.append((dispatch, chunk_size, *knobs))
        return {"float32": {"y": 1e-7}}

    small = {
        "d_model": 8, "n_layers": 2, "n_heads": 1, "head_dim": 8, "state_dim": 4, "ffn_dim": 8,
    }  # fmt: skip

    def tiny(*, model_config: dict[str, Any], **given: Any) -> TrainingConfig:
        return TrainingConfig(model_config={**model_config, **small}, vocab_size=50, **given)

    monkeypatch.setattr(bench_cases, "parity_errors", parity_errors)
    monkeypatch.setattr(training_step, "TrainingConfig", tiny)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(training_step, "DEVICE", CPU)
    training_step.gate.cache_clear()
    return checks


CPU = torch.device("cpu")


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["training_step.py", *arguments, "--out", str(out)])
    training_step.main()
    return rows.read(out) if out.is_file() else []


FEW = ("--batch", "2", "--length", "16", "--opt-steps", "2", "--warm-up", "1", "--commit", "abc")


def test_several_variants_of_one_process_and_one_gate_for_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: list
) -> None:
    first, second, third = measured(
        monkeypatch, tmp_path / "rows.jsonl", *FEW, "--variant", "rotated:eager:0", "--variant",
        "rotated:eager:1:accumulate=3", "--variant", "rotated:eager:0:chunk=4,batch=1",
    )  # fmt: skip
    assert on_cpu == [("rotated", 64, "1", "4"), ("rotated", 4, "1", "4")]
    assert (first["accumulation"], second["accumulation"], third["chunk_size"]) == (1, 3, 4)
    for row in (first, second, third):
        tokens = row["micro_batch"] * row["seq_len"] * row["accumulation"]
        assert row["tokens_per_sec"] == pytest.approx(1e3 * tokens / row["median_ms"], rel=0.02)
        assert row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert (row["timed_opt_steps"], row["warm_up_opt_steps"]) == (2, 1)
        assert (row["compile_in_effect"], row["compile_cache_hits"]) == (None, 0)
        assert row["environment"]["git"]["commit"] == "abc" and row["peak_mem_gib"] > 0
        assert row["environment"]["command"].startswith("python training_step.py")
        assert "boot" in row["environment"] and row["losses"][1] < row["losses"][0]
    assert first["losses"][0] == pytest.approx(second["losses"][0], abs=1e-3)


def test_an_optimizer_step_takes_its_micro_steps(on_cpu: list) -> None:
    config = Variant.parse("rotated:eager:0:batch=2,length=16,accumulate=3").config()
    loop = training_step.AccumulatingLoop(config, CPU)
    for _ in range(2):
        loop.opt_step()
    loop.settle()
    assert (loop.calls, loop.opt_steps) == (6, 2)


def test_out_of_memory_is_a_row_and_anything_else_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: list
) -> None:
    whole = training_step.AccumulatingLoop.opt_step

    def opt_step(loop: training_step.AccumulatingLoop, problem: Exception) -> torch.Tensor:
        if loop.config.batch_size > 2:
            raise problem
        return whole(loop)

    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
    lost = functools.partialmethod(opt_step, problem=torch.OutOfMemoryError(said))
    monkeypatch.setattr(training_step.AccumulatingLoop, "opt_step", lost)
    arguments = (*FEW, "--variant", "rotated:eager:0:batch=4", "--variant", "rotated:eager:0")
    large, small = measured(monkeypatch, tmp_path / "rows.jsonl", *arguments)
    assert large["benchmark"] == "training_step_out_of_memory" and "median_ms" not in large
    assert large["said"] == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert Variant.of(large).micro_batch == 4 and small["benchmark"] == "training_step"
    lost = functools.partialmethod(opt_step, problem=RuntimeError("a bug"))
    monkeypatch.setattr(training_step.AccumulatingLoop, "opt_step", lost)
    with pytest.raises(RuntimeError, match="a bug"):
        measured(monkeypatch, tmp_path / "none.jsonl", *arguments)
    assert not (tmp_path / "none.jsonl").exists()


def test_no_variant_begins_after_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: list, capsys: pytest.CaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(training_step.time, "perf_counter", lambda: clock[0])

    def measure(variant: Variant, *_: Any) -> dict[str, Any]:
        clock[0] += 40
        return {"benchmark": "training_step", **variant.settings}

    monkeypatch.setattr(training_step, "measure", measure)
    wanted = [f"rotated:eager:0:batch={n}" for n in (1, 2, 3, 4)]
    arguments = [word for text in wanted for word in ("--variant", text)]
    found = measured(monkeypatch, tmp_path / "rows.jsonl", *arguments, "--max-time", "80")
    assert [row["micro_batch"] for row in found] == [1, 2]
    assert capsys.readouterr().err == "out of time: 2 variants left\n"


def test_launch_knobs_hold_for_their_variant_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: list
) -> None:
    warps = training_step.LAUNCH_KNOBS["num_warps"]
    monkeypatch.setenv(warps, "16")
    # On a CPU the block falls back, and a row under the kernel's name would be a lie.
    with pytest.raises(SystemExit, match=r"asked for 'triton', but \['pytorch'\] ran: no row"):
        measured(
            monkeypatch, tmp_path / "rows.jsonl", *FEW, "--variant",
            "triton:eager:0:warps=8,stages=2",
        )  # fmt: skip
    assert on_cpu == [("triton", 64, "2", "8")]
    assert training_step.os.environ[warps] == "16"
    assert training_step.LAUNCH_KNOBS["num_stages"] not in training_step.os.environ
    assert not (tmp_path / "rows.jsonl").exists()
