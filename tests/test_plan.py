"""`mamba3-lite plan`: what it predicts, against recorded runs and the code itself; what it says."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mamba3_lite import cli, hardware
from mamba3_lite.measure import budget, plan
from mamba3_lite.models import arithmetic
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.config import TrainingConfig, load_training_config
from mamba3_lite.utils.checkpoint import CheckpointManager, estimate_bytes

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PRODUCTION = "configs/pretrain_a100_400m.yaml"
FAST = "configs/pretrain_h200_434m.yaml"
# Recorded with a float32 residual stream and unfused pieces of logits.
BEFORE_THE_BF16_STREAM = "ab23b08"


def recorded() -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / "training_step.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["benchmark"] == "training_step"]


def commit(row: dict[str, Any]) -> str:
    return row["environment"]["git"]["commit"]


def name_of(row: dict[str, Any]) -> str:
    keys = ("dispatch", "compile", "grad_checkpoint", "micro_batch", "seq_len")
    return "-".join(str(row[key]) for key in keys)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints, table lines and line ends as single blanks."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (0, "")
    return " ".join(re.sub("[─-╿]", " ", captured.out).split())


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *arguments, "--json"])
    assert stop.value.code == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one error line; nothing is printed before it."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


# Memory and speed against recorded training steps -------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [row for row in recorded() if not commit(row).startswith(BEFORE_THE_BF16_STREAM)],
    ids=name_of,
)
def test_memory_is_that_of_a_recorded_step(row: dict[str, Any]) -> None:
    config = TrainingConfig(
        model_config={
            "ssd_dispatch": row["dispatch"], "grad_checkpoint": row["grad_checkpoint"],
            "chunk_size": row.get("chunk_size", 64),
        },
        batch_size=row["micro_batch"], max_seq_len=row["seq_len"],
        gradient_accumulation_steps=row.get("accumulation", 1),
        compile_model=row["compile"] != "eager",
    )  # fmt: skip
    predicted = budget.peak_bytes(config, row["dispatch"]) / 2**30
    assert predicted == pytest.approx(row["peak_mem_gib"], rel=plan.MEMORY_TOLERANCE)


def test_the_fast_step_is_predicted_to_a_percent_part_by_part() -> None:
    config = TrainingConfig(
        grad_checkpoint=False, gradient_accumulation_steps=1,
        model_config={"ssd_dispatch": "fused"},
    )  # fmt: skip
    moments = budget.memory_moments(config, "fused")
    assert budget.fullest(moments) == "head and loss"
    gib = {name: size / 2**30 for name, size in moments["head and loss"].items()}
    assert sum(gib.values()) == pytest.approx(40.54, rel=0.01)  # 16 x 2,048 and 1 x 32,768
    tokens, per_layer = 32_768 / 2**30, 28
    assert gib["weights, float32"] == pytest.approx(4 * 433_662_848 / 2**30)
    assert gib["AdamW moments, float32"] == 2 * gib["weights, float32"]
    # Projection, states at the edges of chunks of 64, three numbers of phase.
    ssd = 2 * 5136 + 16 * (2 * 2 * 64 * 64 // 64 + 3 * 4)
    assert gib["28 blocks: SSD"] == pytest.approx(per_layer * ssd * tokens)
    assert gib["28 blocks: the rest"] == pytest.approx(per_layer * (2 * 12_288 + 8) * tokens)
    assert "gradients, float32" not in gib  # the only micro-step's backward makes them
    longer = replace(config, batch_size=1, max_seq_len=32_768)
    assert budget.peak_bytes(longer, "fused") == budget.peak_bytes(config, "fused")


def test_accumulation_keeps_the_gradients_over_the_forward_pass() -> None:
    one = TrainingConfig(grad_checkpoint=False, gradient_accumulation_steps=1)
    more = replace(one, gradient_accumulation_steps=4)
    difference = budget.peak_bytes(more, "fused") - budget.peak_bytes(one, "fused")
    assert difference == arithmetic.weight_bytes(one.model())


def test_recomputation_lowers_the_peak_and_autocast_remembers_casts_uncompiled() -> None:
    config = TrainingConfig(compile_model=True)
    peaks = [
        budget.peak_bytes(replace(config, grad_checkpoint=choice), "fused")
        for choice in (True, "selective", False)
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[2] / 3
    casts = "bf16 copies of weights"
    assert casts not in budget.memory_moments(config, "fused")["head and loss"]
    eager = budget.memory_moments(replace(config, compile_model=False), "fused")
    counts = arithmetic.parameter_counts(config.model())
    products = sum(counts[part] for part in ("in_proj", "mimo", "out_proj", "ffn"))
    assert eager["head and loss"][casts] == 2 * products


@pytest.mark.parametrize("measured", budget.MEASURED, ids=lambda m: f"{m.dispatch}-{m.commit}")
def test_each_measured_mfu_is_in_the_records(measured: budget.Measured) -> None:
    rows = [
        row
        for row in recorded()
        if commit(row).startswith(measured.commit)
        and row["environment"]["gpus"][0]["name"] == f"NVIDIA {measured.gpu}"
        and (row["dispatch"], row["compile"] != "eager") == (measured.dispatch, measured.compiled)
        and row["grad_checkpoint"] == measured.grad_checkpoint
        and (row["micro_batch"], row["seq_len"]) == (16, 2048)
    ]
    assert measured.mfu in [row["mfu"] for row in rows]


def test_speed_is_a_recorded_one_or_scaled_or_unknown() -> None:
    config = TrainingConfig(model_config={"ssd_dispatch": "fused"}, grad_checkpoint=False)
    measured = budget.expected_speed(config, "fused", "H200")
    assert measured is not None and measured.basis.startswith("measured at ")
    eager = TrainingConfig(
        model_config={"ssd_dispatch": "pytorch"}, grad_checkpoint=True, compile_model=False
    )
    recomputing = budget.expected_speed(eager, "pytorch", "H200")
    other = budget.expected_speed(replace(eager, grad_checkpoint=False), "pytorch", "H200")
    assert recomputing is not None and recomputing.basis.startswith("measured at ")
    assert other is not None and other.basis.endswith("scaled by FLOPs")
    assert other.mfu == pytest.approx(recomputing.mfu * 3476 / 2686, rel=1e-3)
    assert budget.expected_speed(config, "fused", "A100") is None


# The command --------------------------------------------------------------------------------------


def test_the_factors_of_the_seed_run_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, PRODUCTION)
    assert "16 x 2,048 = 32,768" in text
    assert "16 x 2 x 2,048 = 65,536" in text
    exposures = "65,536 x 256,000 = 16.78 B exposures over 8.0 B tokens = 2.1 epochs"
    assert exposures in text
    assert "433,662,400" in text
    assert "the data are shorter than the run: 8,000,000,000 tokens are read 2.1 times" in text
    assert "loss@2000 lies inside the warm-up of 2,000" in text
    assert "3.0e-06 to 3.0e-04 over 2,000 optimizer steps, then to 1.5e-05 at 256,000" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_has_a_plan_with_exact_parameters(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = as_json(capsys, str(path))
    config, _ = load_training_config(path)
    with torch.device("meta"):
        model = Mamba3Transformer(config.model())
    assert facts["parameters"]["all"] == sum(p.numel() for p in model.parameters())
    assert facts["tokens"]["run"] == config.total_tokens
    assert sum(facts["memory"]["parts"].values()) == facts["memory"]["peak_bytes"]
    assert facts["memory"]["peak_bytes"] == max(facts["memory"]["moments"].values())
    chosen = str(config.model().grad_checkpoint).lower()
    assert facts["memory"]["by_grad_checkpoint"][chosen] == facts["memory"]["peak_bytes"]
    assert [row["gpu"] for row in facts["gpus"]] == ["H200", "H100", "A100"]
    text = shown(capsys, str(path))
    assert f"{facts['parameters']['all']:,}" in text and "GPU memory" in text


def test_hours_and_cost_follow_from_mfu_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--gpu", "A100", "--gpu", "h100", "--mfu", "0.4", "--price", "2", "--price", "3.5")
    facts = as_json(capsys, PRODUCTION, *names)
    a100, h100 = facts["gpus"]
    assert (a100["gpu"], h100["gpu"], a100["basis"]) == ("A100", "H100", "stated")
    assert a100["tps"] == pytest.approx(0.4 * 312e12 / 2_601_621_504)
    assert a100["hours"] == pytest.approx(65_536 * 256_000 / a100["tps"] / 3600)
    assert a100["cost"] == pytest.approx(2 * a100["hours"])
    assert h100["cost"] == pytest.approx(3.5 * h100["hours"])
    assert h100["memory_bytes"] == 80 * 10**9
    text = shown(capsys, PRODUCTION, "--gpu", "A100", "--mfu", "0.4", "--price", "2")
    assert f"{a100['cost']:,.2f}" in text and f"{a100['tps']:,.0f}" in text


def test_what_was_not_measured_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    h200, a100 = as_json(capsys, FAST, "--gpu", "H200", "--gpu", "A100")["gpus"]
    assert h200["tps"] == pytest.approx(179_162, rel=1e-3)
    assert "tps" not in a100 and "not measured" in a100["basis"]
    assert "not measured: give --mfu" in shown(capsys, FAST, "--gpu", "A100")


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (("training.warmup_steps=20000",), "warm-up takes 16% of the run (20,000 of 122,070"),
        (("training.warmup_steps=3000", "--loss-at", "2500"), "loss@2500 lies inside the warm-up"),
        (("training.total_steps=200000",), "the data are shorter than the run"),
        (("training.total_steps=10000",), "1.5 tokens a parameter"),
        (("--gpu", "L4"), "does not fit on L4: 42."),
        (("model.n_layers=4", "model.d_model=256"), "speed was measured at 434 M parameters"),
        (("model.ssd_dispatch=triton",), "without ENABLE_TRITON_KERNELS=1 runs pytorch"),
    ],
)
def test_warnings(
    arguments: tuple[str, ...], warning: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
    told = as_json(capsys, FAST, *arguments)["warnings"]
    assert len([sentence for sentence in told if warning in sentence]) == 1, told
    text = shown(capsys, FAST, *arguments)
    assert all(f"[warn] {sentence}" in text for sentence in told)


def test_a_sound_run_has_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    sound = ("training.warmup_steps=1000", "model.vocab_size=10000", "--gpu", "H200")
    assert as_json(capsys, FAST, *sound)["warnings"] == []


def test_a_tight_gpu_is_told_from_one_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--gpu", "A100 40GB", "training.gradient_accumulation_steps=1")
    for batch, verdict in ((13, "may not fit"), (16, "does not fit")):
        facts = as_json(capsys, FAST, *arguments, f"training.micro_batch_size={batch}")
        assert [w for w in facts["warnings"] if verdict in w], (batch, facts["warnings"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("configs/none.yaml",), "configs/none.yaml"),
        ((FAST, "training.lrr=1"), "did you mean 'lr'?"),
        ((FAST, "--gpu", "H2000"), "did you mean 'H200'?"),
        ((FAST, "--mfu", "40"), "--mfu 40 must lie between 0 and 1"),
        ((FAST, "--price", "-1"), "--price must be 0 or more"),
        ((FAST, "--price", "1", "--price", "2"), "2 --price for 3 GPUs"),
        ((FAST, "--loss-at", "0"), "--loss-at 0"),
        ((FAST, "--plot", "curve.pdf"), "ends in .png"),
        ((FAST, "--plot", "no/such/folder/curve.png"), "cannot be written"),
        ((FAST, "model.ssd_dispatch=fused", "model.head_dim=512"), "at most 256 are possible"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *arguments)


def test_the_picture_and_its_absence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "curve.png"
    assert f"picture: {target}" in shown(capsys, FAST, "--plot", str(target))
    assert target.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "mamba3-lite[plots]" in refused(capsys, FAST, "--plot", str(target))


def test_the_sparkline_rises_and_falls_with_the_rate() -> None:
    config = TrainingConfig(max_steps=1000, warmup_steps=500)
    line = plan.sparkline(config, 41)
    heights = [plan._SPARKS.index(character) for character in line]
    assert len(line) == 41 and heights[0] == heights[-1] == 0 and heights[20] == 7
    assert heights[:21] == sorted(heights[:21]) and heights[20:] == sorted(heights[20:])[::-1]


@pytest.mark.parametrize(("keep_last", "keep_every"), [(3, 0), (1, 40), (0, 0), (2, 20)])
def test_disk_need_is_what_the_checkpoint_manager_leaves(
    tmp_path: Path, keep_last: int, keep_every: int
) -> None:
    config = TrainingConfig(
        max_steps=115, warmup_steps=1, save_every=10, keep_last=keep_last, keep_every=keep_every
    )
    manager = CheckpointManager(
        tmp_path, keep_last=keep_last, keep_every=keep_every, log=lambda line: None
    )
    steps = [*range(10, 115, 10), 115]
    for step in steps:
        manager.save(step, {"w": torch.ones(1)}, {}, {})
    need = budget.disk(config)
    assert need["kept"] == len(manager.steps()) and need["saved"] == len(steps)
    one = sum(need["checkpoint_bytes"].values())
    assert need["needed_bytes"] == min(len(steps), len(manager.steps()) + 1) * one


def test_a_checkpoint_has_the_size_that_a_run_reckons_with() -> None:
    model = Mamba3Transformer({"d_model": 16, "n_layers": 1, "ffn_dim": 16, "vocab_size": 50})
    config = TrainingConfig(model_config=vars(model.cfg), vocab_size=50)
    sizes = budget.disk(config)["checkpoint_bytes"]
    assert sum(sizes.values()) + 2**20 == estimate_bytes(model.state_dict())


def test_data_that_are_there_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(torch.arange(1001) % 50, tmp_path / "tokens.bin")
    arguments = (
        "model.max_seq_len=100", "training.micro_batch_size=2",
        "training.gradient_accumulation_steps=1", "training.total_steps=25",
        "training.warmup_steps=1", f"data.train_data_path={tmp_path / 'tokens.bin'}",
    )  # fmt: skip
    tokens = as_json(capsys, FAST, *arguments)["tokens"]
    assert (tokens["data"], tokens["epochs"], tokens["run"]) == (1000, 5.0, 5000)
    assert tokens["data_source"] == str(tmp_path / "tokens.bin")


def test_paths_are_resolved_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
    for changes, path in (
        ({"ssd_dispatch": "auto"}, "fused"),
        ({"ssd_dispatch": "auto", "head_dim": 512}, "rotated"),
        ({"ssd_dispatch": "triton"}, "triton"),
        ({"ssd_dispatch": "triton", "chunk_size": 96}, "pytorch"),
        ({"ssd_dispatch": "rotated"}, "rotated"),
    ):
        assert budget.planned_dispatch(ModelConfig(**changes))[0] == path, changes


def test_stated_gpus_have_a_peak_and_a_memory() -> None:
    for name in hardware.GPU_NAMES:
        gpu = hardware.stated_gpu(name.lower())
        assert gpu is not None and gpu.name == name
        assert gpu.peak_bf16_flops > 5e13 and gpu.memory_bytes >= 24 * 10**9
    assert hardware.stated_gpu("H200") == ("H200", 989e12, 141 * 10**9)
    assert hardware.stated_gpu("V100") is None


def test_the_figures_of_the_guide_are_what_plan_computes() -> None:
    page = (ROOT / "docs" / "guides" / "plan.md").read_text(encoding="utf-8")
    config, _ = load_training_config(ROOT / FAST, ["training.gradient_accumulation_steps=1"])
    parts = budget.memory_moments(config, "fused")["head and loss"]
    rows = [f"| {name} | ... | {size / 2**30:.2f} |" for name, size in parts.items()]
    rows.append(f"| **predicted** | ... | **{sum(parts.values()) / 2**30:.2f}** |")
    measured = [
        row
        for row in recorded()
        if name_of(row) == "fused-default-False-16-2048" and row.get("accumulation", 1) == 1
    ]
    rows.append(f"| **measured** | ... | **{measured[-1]['peak_mem_gib']:.2f}** |")
    for dispatch, compiled in (
        ("fused", True), ("rotated", True), ("pytorch", True), ("pytorch", False),
    ):  # fmt: skip
        memories = [
            arithmetic.block_memory(
                ModelConfig(grad_checkpoint=choice), dispatch=dispatch, compiled=compiled
            )
            for choice in (False, "selective", True)
        ]
        kept = " | ".join(f"{memory.ssd + memory.rest:,}" for memory in memories)
        word = "yes" if compiled else "no"
        rows.append(f"| {dispatch} | {word} | {kept} | {memories[-1].fullest:,} |")
    shortened = re.sub(r"^(\| [^|]+ \|) [^|]* (\| [\d.*]+ \|)$", r"\1 ... \2", page, flags=re.M)
    assert [row for row in rows if row not in shortened and row not in page] == []
    for constant in (f"{plan.LONGEST_WARMUP:.0%}", f"{plan.MEMORY_TOLERANCE:.0%}"):
        assert constant.replace("%", " %") in page
    assert (
        f"fewer than {plan.TOKENS_PER_PARAMETER} tokens" in page and f"; {plan.LOSS_AT} |" in page
    )
