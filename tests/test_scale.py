"""`mamba3-lite plan --gpus N`: the model of many GPUs, against the trainer and by hand."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mamba3_lite import cli, hardware
from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.measure import budget, links, plan, scale
from mamba3_lite.measure.links import Cluster, Link
from mamba3_lite.measure.scale import Exchange, Group
from mamba3_lite.models import arithmetic
from mamba3_lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3_lite.training.config import TrainingConfig, load_training_config
from mamba3_lite.training.guard import AccumulationWindow
from mamba3_lite.training.optim import build_optimizer
from mamba3_lite.training.parallel import chosen_mode, parallelize
from mamba3_lite.training.schedule import build_schedule
from mamba3_lite.training.step import train_step

ROOT = Path(__file__).resolve().parent.parent
FAST = str(ROOT / "configs" / "pretrain_h200_434m.yaml")
PAGE = ROOT / "docs" / "guides" / "plan.md"
# Shapes of the guide: 1.3 B and 7 B parameters.
BILLION = (
    "model.d_model=2048", "model.n_heads=32", "model.ffn_dim=4096", "model.n_layers=22",
    "training.micro_batch_size=8",
)  # fmt: skip
SEVEN_BILLION = (
    "model.d_model=4096", "model.n_heads=64", "model.ffn_dim=8192", "model.n_layers=31",
    "training.micro_batch_size=4", "training.grad_checkpoint=true",
)  # fmt: skip
H200 = hardware.stated_gpu("H200")
NVLINK = links.LINKS["H200"]


def config_of(*overrides: str) -> TrainingConfig:
    return load_training_config(FAST, list(overrides))[0]


def cluster_of(gpus: int, nodes: int, **options: Any) -> Cluster:
    given = {"node_link": "NDR", "link_gb_s": None, "node_link_gb_s": None, **options}
    found = links.asked_cluster(gpus, nodes, **given)
    assert found is not None
    return found


def micro_step_sec(config: TrainingConfig) -> float:
    """One H200 alone, as ``plan`` has it."""
    (row,) = plan.make_plan(config, plan._offers(["H200"], None, None), None)["gpus"]
    return config.tokens_per_micro_step / row["tps"]


# Against the trainer ------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 50, "d_model": 16, "n_layers": 3, "n_heads": 2, "head_dim": 8, "state_dim": 4,
    "ffn_dim": 24,
}  # fmt: skip


@pytest.fixture
def eight_ranks() -> Iterator[World]:
    """The first of 8, on two nodes; exchanges are asked for and not done."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield World(torch.device("cpu"), rank=0, size=8, local_size=4, grouped=True)
    dist.destroy_process_group()


class Recorder(TorchDispatchMode):
    """Kind and whole bytes of each collective."""

    KINDS = {
        "_allgather_base_": ("all-gather", 0),
        "_reduce_scatter_base_": ("reduce-scatter", 1),
        "allreduce_": ("all-reduce", 0),
    }

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            kind, whole = self.KINDS.get(name, (name, 0))
            tensors = args[whole] if isinstance(args[whole], list) else [args[whole]]
            self.calls.append((kind, sum(t.nbytes for t in tensors)))
        return function(*args, **(kwargs or {}))


def recorded(config: TrainingConfig, world: World) -> tuple[torch.nn.Module, list[list]]:
    """The trained model, and what each micro-step of the third accumulation window exchanges."""
    model = Mamba3Transformer(config.model())
    trained = parallelize(model, config.parallel_mode, world, shard_ranks=config.shard_ranks)
    optimizer = build_optimizer(model, config)
    AccumulationWindow.of(optimizer).world = world
    schedule, tokens = build_schedule(optimizer, config), torch.randint(0, 50, (2, 8))
    recorder, of_micro_steps = Recorder(), []
    if isinstance(trained, DistributedDataParallel):
        trained.register_comm_hook(recorder, ddp_hook)
    with recorder:
        for micro_step in range(3 * config.gradient_accumulation_steps):
            recorder.calls = []
            train_step(
                trained, optimizer, schedule, config, contextlib.nullcontext(), print, 0,
                tokens, tokens, micro_step,
            )  # fmt: skip
            of_micro_steps.append(recorder.calls)
    return trained, of_micro_steps[-config.gradient_accumulation_steps :]


def ddp_hook(recorder: Recorder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    recorder.calls.append(("all-reduce", bucket.buffer().nbytes))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("mode", "shard_ranks"), [("ddp", 0), ("fsdp", 0), ("hsdp", 0), ("hsdp", 2)]
)
def test_the_trainer_exchanges_what_the_model_says(
    mode: str, shard_ranks: int, tied: bool, eight_ranks: World
) -> None:
    config = TrainingConfig(
        model_config={**TINY, "weight_tying": tied}, vocab_size=50, max_seq_len=8, batch_size=2,
        gradient_accumulation_steps=3, parallel_mode=mode, shard_ranks=shard_ranks,
        grad_checkpoint=False,
    )  # fmt: skip
    cluster = cluster_of(4, 2)
    trained, micro_steps = recorded(config, eight_ranks)
    found = scale.exchanges(config, mode, cluster)
    for kind in {x.kind for x in found} | {kind for step in micro_steps for kind, _ in step}:
        calls = [size for step in micro_steps for k, size in step if k == kind]
        of_kind = [x for x in found if x.kind == kind]
        assert sum(calls) == sum(x.passes * x.payload for x in of_kind), kind
        if mode != "ddp":  # how buckets are filled is DDP's own affair
            assert len(calls) == sum(x.passes * x.calls for x in of_kind), kind
    gathers = [size for kind, size in micro_steps[0] if kind == "all-gather"]
    assert all(len(step) == len(gathers) for step in micro_steps[:-1]), "gradients once a window"
    ranks = scale.shard_ranks(config, mode, cluster)
    parts = scale.rank_memory(config, "rotated", mode, ranks)
    held = sum(_held_bytes(p) for p in trained.parameters())
    name = "weights, float32" + ("" if mode == "ddp" else ", a share")
    assert parts["head and loss"][name] == held
    if isinstance(trained, FSDPModule):
        embedding = 4 * 50 * 16
        reduced = [size for kind, size in micro_steps[-1] if kind == "reduce-scatter"]
        assert reduced[-1] >= embedding, "the embedding comes last and hides behind nothing"
        assert gathers[0] == scale.cut(config.model(), ranks).root


def _held_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.nbytes


@pytest.mark.parametrize("overrides", [(), BILLION, SEVEN_BILLION], ids=["434M", "1.3B", "7B"])
@pytest.mark.parametrize("gpu", ["L4", "A100 40GB", "A100", "H200"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_auto_is_what_the_trainer_chooses(
    overrides: tuple[str, ...], gpu: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stated = config_of(*overrides), hardware.stated_gpu(gpu)
    assert stated is not None
    with torch.device("meta"):
        model = Mamba3Transformer(config.model())
    properties = type("Properties", (), {"total_memory": stated.memory_bytes})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    world = World(torch.device("cuda", 0), size=8 * nodes, local_size=8, grouped=True)
    chosen = chosen_mode("auto", model, world)
    assert scale.planned_mode(config, stated, cluster_of(8, nodes)) == chosen
    explicit = replace(config, parallel_mode="fsdp")
    assert scale.planned_mode(explicit, stated, cluster_of(8, nodes)) == "fsdp"


# By hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [(), BILLION, ("model.weight_tying=false",)])
def test_the_groups_hold_every_parameter_once(overrides: tuple[str, ...]) -> None:
    model = config_of(*overrides).model()
    groups = scale.cut(model, 1)
    whole = model.n_layers * groups.block + groups.root + groups.a
    assert whole == arithmetic.weight_bytes(model)


def test_rows_that_do_not_divide_are_padded() -> None:
    model = ModelConfig(**TINY)
    # 50, 16, 16, 48, 16 rows of 16, 16, 16, 16, 24 columns and two norms of 16, over 5 ranks.
    padded = 50 * 16 + 20 * 16 + 20 * 16 + 50 * 16 + 20 * 24 + 20 + 20
    assert scale.cut(model, 5) == (4 * padded, 4 * (50 * 16 + 20), 8 * 3 * 2)


SLOW = Link("slow", 1e9, 1e-3)


def two_nodes(gpus: int) -> Cluster:
    return Cluster(gpus, 2, between=Link("slower", 1e8, 1e-2))


@pytest.mark.parametrize(
    ("exchange", "gpus", "sent", "leaves", "seconds"),
    [
        # Two nodes of one: half of 8 MB, at 80 % of 100 MB/s, and one hop of 10 ms.
        (Exchange("all-gather", Group(2, 1), 8e6, 1, "alone"), 1, 4e6, 4e6, 0.05 + 0.01),
        # Back and forth: twice of both.
        (Exchange("all-reduce", Group(2, 1), 8e6, 1, "alone"), 1, 8e6, 8e6, 0.1 + 0.02),
        # Four on one node: 3/4 of 8 MB at 80 % of 1 GB/s, three hops of 1 ms in each of 5 calls.
        (Exchange("reduce-scatter", Group(4, 4), 8e6, 5, "alone"), 4, 6e6, 0.0, 0.0075 + 0.015),
        # Two nodes of two: 3/4 leave each node once; two hops inside, one between.
        (Exchange("all-gather", Group(4, 2), 8e6, 1, "alone"), 2, 6e6, 6e6, 0.075 + 0.012),
        # Two groups share a node's way out: each sends half of 8 MB.
        (Exchange("all-gather", Group(2, 1), 8e6, 1, "alone"), 2, 4e6, 8e6, 0.1 + 0.01),
    ],
)
def test_an_exchange_by_hand(
    exchange: Exchange, gpus: int, sent: float, leaves: float, seconds: float
) -> None:
    assert exchange.sent == pytest.approx(sent)
    assert exchange.leaves_node(gpus) == pytest.approx(leaves)
    assert exchange.seconds(two_nodes(gpus), SLOW) == pytest.approx(seconds)


def test_an_all_reduce_over_many_nodes_takes_trees() -> None:
    cluster = Cluster(2, 64, between=Link("slower", 1e8, 1e-2))
    nothing = Exchange("all-reduce", Group(128, 2), 0, 1, "alone")
    assert nothing.seconds(cluster, SLOW) == pytest.approx(2 * (1e-3 + 6 * 1e-2))
    ring = nothing._replace(kind="all-gather").seconds(cluster, SLOW)
    assert ring == pytest.approx(64 * 1e-3 + 63 * 1e-2)


def test_ddp_of_the_seed_model_by_hand() -> None:
    config, cluster = config_of(), cluster_of(8, 1)
    total = scale.volume(scale.exchanges(config, "ddp", cluster), 8)["all-reduce"]
    assert total["sent_bytes"] == pytest.approx(2 * 7 / 8 * (4 * 433_662_848 + 16))
    assert total["leaves_node_bytes"] == 0
    time = scale.step_time(config, "ddp", cluster, NVLINK, micro_step_sec=0.2)
    # 360 GB/s; the embedding and 16 bytes are alone, two calls of 14 hops each.
    alone = 2 * 7 / 8 * (4 * 51_463_168 + 16) / 360e9 + 2 * 14 * 3.4e-6
    assert time.exposed == pytest.approx(alone)
    assert time.compute == 0.4
    reached = scale.efficiency(config, "ddp", cluster, NVLINK, 0.2)
    assert reached == pytest.approx(0.4 / (0.4 + alone))


def test_what_a_pass_cannot_hide_is_exposed_in_each_pass() -> None:
    config = config_of("training.gradient_accumulation_steps=3", "parallel.mode=fsdp")
    slow = Cluster(8, 1, between=SLOW, within=Link("slow", 1e9, 0.0))
    link = slow.within
    assert link is not None
    block, root, _ = scale.cut(config.model(), 8)
    forward = 0.3 * 892.9 / 2686.0
    gather = 27 * block * 7 / 8 / 0.8e9
    exposed = 3 * (gather - 0.8 * forward) + 2 * (gather - 0.8 * (0.3 - forward))
    exposed += 2 * gather - 0.8 * (0.3 - forward)  # the last backward pass reduces as well
    exposed += (3 * (root + 2 * block) + root + block) * 7 / 8 / 0.8e9
    time = scale.step_time(config, "fsdp", slow, link, micro_step_sec=0.3)
    assert time.exposed == pytest.approx(exposed, rel=1e-4)
    assert time.exchange == pytest.approx(exposed + 0.8 * 0.9, rel=1e-4)


def test_hybrid_sharding_sends_only_gradients_between_nodes() -> None:
    config, cluster = config_of(), cluster_of(8, 16)
    whole = arithmetic.weight_bytes(config.model())
    hybrid = scale.volume(scale.exchanges(config, "hsdp", cluster), 8)
    assert hybrid["all-gather"]["leaves_node_bytes"] == 0
    assert hybrid["reduce-scatter"]["leaves_node_bytes"] == 0
    leaves = hybrid["all-reduce"]["leaves_node_bytes"]
    assert leaves == pytest.approx(2 * 15 / 16 * whole, rel=1e-3)
    assert hybrid["all-reduce"]["sent_bytes"] == pytest.approx(leaves / 8, rel=1e-3)
    flat = scale.volume(scale.exchanges(config, "fsdp", cluster), 8)
    # Two micro-steps gather the blocks twice each, and the root once.
    root = 4 * 50_257 * 1024
    assert flat["all-gather"]["leaves_node_bytes"] == pytest.approx(
        127 / 128 * (4 * whole - 2 * root), rel=0.03
    )
    wide = replace(config, shard_ranks=16)
    spread = scale.volume(scale.exchanges(wide, "hsdp", cluster), 8)
    assert spread["all-gather"]["leaves_node_bytes"] > 0
    # A copy is on two nodes, so each sends half of its gradients.
    leaves = spread["all-reduce"]["leaves_node_bytes"]
    assert leaves == pytest.approx(7 / 8 * whole, rel=1e-3)


# Which way things go ------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [(), BILLION, SEVEN_BILLION], ids=["434M", "1.3B", "7B"])
@pytest.mark.parametrize("mode", scale.MODES)
def test_efficiency_falls_with_gpus_and_rises_with_links_and_accumulation(
    mode: str, overrides: tuple[str, ...]
) -> None:
    config = config_of(*overrides)
    seconds = micro_step_sec(config)

    def reached(cluster: Cluster, config: TrainingConfig = config) -> float:
        return scale.efficiency(config, mode, cluster, cluster.link("H200"), seconds)

    points = scale.curve(config, mode, cluster_of(8, 1), NVLINK, seconds)
    sizes, values = zip(*points, strict=True)
    assert sizes == tuple(2**i for i in range(11))
    assert values[0] > 0.999 and all(0 < value <= 1 for value in values)
    assert list(values) == sorted(values, reverse=True)
    within = [reached(cluster_of(8, 1, link_gb_s=x)) for x in (10, 50, 450)]
    between = [reached(cluster_of(8, 4, node_link_gb_s=x)) for x in (5, 50, 400)]
    named = [reached(cluster_of(8, 4, node_link=x)) for x in ("100GbE", "hdr", "NDR", "xdr")]
    for rising in (within, between, named):
        assert rising == sorted(rising)
    assert within[0] < within[-1] and between[0] < between[-1]
    longer = replace(config, gradient_accumulation_steps=8)
    assert reached(cluster_of(8, 4), longer) >= reached(cluster_of(8, 4))


def test_flat_sharding_pays_for_many_nodes_and_hybrid_does_not() -> None:
    config, cluster = config_of(), cluster_of(8, 128)
    seconds = micro_step_sec(config)
    ddp, fsdp, hsdp = (
        scale.efficiency(config, mode, cluster, NVLINK, seconds) for mode in scale.MODES
    )
    assert fsdp < 0.75 and ddp > 0.95 and hsdp > 0.95


def test_memory_of_a_rank() -> None:
    config = config_of(*SEVEN_BILLION, "training.gradient_accumulation_steps=1")

    def peak(mode: str, ranks: int, config: TrainingConfig = config) -> int:
        moments = scale.rank_memory(config, "fused", mode, ranks)
        return max(sum(parts.values()) for parts in moments.values())

    whole = arithmetic.weight_bytes(config.model())
    accumulated = replace(config, gradient_accumulation_steps=4)
    assert peak("ddp", 1) == peak("ddp", 1, accumulated) == budget.peak_bytes(accumulated, "fused")
    assert peak("ddp", 1) > 4 * whole
    cut = [peak("fsdp", ranks) for ranks in (2, 8, 64, 1024)]
    assert cut == sorted(cut, reverse=True)
    # Weights, gradients and moments are cut: what is left at 1,024 does not grow with the layers.
    assert cut[0] - cut[1] == pytest.approx(4 * whole * (1 / 2 - 1 / 8), rel=0.02)
    assert cut[-1] < whole
    # Within a window nothing is exchanged, so every gradient is there as a whole.
    accumulating = peak("fsdp", 1024, replace(config, gradient_accumulation_steps=2))
    assert accumulating - cut[-1] == pytest.approx(whole, rel=0.01)
    assert peak("hsdp", 8) == peak("fsdp", 8)


# The command --------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    assert stop.value.code == code, captured.err
    return captured.err if code else captured.out


def test_the_command_counts_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpu", "H200", "--gpu", "A100", "--price", "2", "--gpus", "8", "--nodes", "4")
    facts = json.loads(said(capsys, FAST, *options, "--json"))
    many, tokens = facts["many_gpus"], facts["tokens"]
    assert (many["gpus"], many["nodes"], many["ranks"]) == (8, 4, 32)
    assert tokens["opt_step"] == 32 * 65_536
    assert tokens["run"] == 32 * 65_536 * 122_070
    assert tokens["epochs"] == pytest.approx(32 * 65_536 * 122_070 / 8e9)
    h200, a100 = many["on"]
    alone = facts["gpus"][0]
    assert h200["tps"] == pytest.approx(32 * alone["tps"] * h200["efficiency"])
    assert h200["hours"] == pytest.approx(tokens["run"] / h200["tps"] / 3600)
    assert h200["cost"] == pytest.approx(64 * h200["hours"])
    assert h200["basis"].startswith("model, not measured; one GPU: measured at ")
    assert "tps" not in a100 and a100["basis"] == "not measured: give --mfu"
    assert (h200["mode"], h200["link"]["bytes_per_sec"]) == ("ddp", 450e9)
    assert a100["memory_share"] == pytest.approx(42.08 * 2**30 / 80e9, rel=1e-3)
    text = " ".join(re.sub("[─-╿]", " ", said(capsys, FAST, *options)).split())
    for part in (
        "16 x 2 x 2,048 x 32 ranks = 2,097,152", "32 GPUs: 4 x 8", "GPU memory of a rank, ddp",
        f"{h200['tps']:,.0f}", f"{h200['hours']:,.2f}", "model, not", "training.total_steps=3815",
        "InfiniBand NDR, 400 Gb/s a GPU: 400 GB/s out of a node", "80% of a stated speed",
        "are read 32.0 times",
    ):  # fmt: skip
        assert part in text, part


def test_one_gpu_is_planned_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    plain = said(capsys, FAST)
    assert said(capsys, FAST, "--gpus", "1", "--nodes", "1") == plain
    assert "rank" not in plain and "many_gpus" not in said(capsys, FAST, "--json")


def test_seven_billion_on_a_thousand_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpu", "H200", "--gpus", "8", "--nodes", "128", "--json")
    facts = json.loads(said(capsys, FAST, *SEVEN_BILLION, *options))
    (row,) = facts["many_gpus"]["on"]
    assert 6.9e9 < facts["parameters"]["all"] < 7.1e9
    assert (row["mode"], row["shard_ranks"]) == ("hsdp", 8)
    assert row["memory_share"] < 0.5 and 0.9 < row["efficiency"] < 1
    parts = facts["many_gpus"]["modes"]["hsdp"]["memory"]["parts"]
    assert sum(parts.values()) == pytest.approx(row["memory_share"] * row["memory_bytes"])
    # Whole on every GPU it would not fit on 80 GB, and the way out is named.
    ddp = ("parallel.mode=ddp", "--gpu", "H100", "--gpus", "8", "--json")
    told = json.loads(said(capsys, FAST, *SEVEN_BILLION, *ddp))["warnings"]
    assert [w for w in told if "does not fit on H100" in w and "parallel.mode to fsdp" in w]


def test_a_measured_factor_has_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (FAST, "--gpu", "H200", "--gpus", "8", "--json")

    def row(*more: str) -> dict[str, Any]:
        return json.loads(said(capsys, *arguments, *more))["many_gpus"]["on"][0]

    model, across = row(), row("--nodes", "2")
    monkeypatch.setattr(scale, "MEASURED", (scale.Factor("ddp", False, 0.9, "abc1234"),))
    corrected = row()
    assert corrected["efficiency"] == pytest.approx(0.9 * model["efficiency"])
    assert corrected["tps"] == pytest.approx(0.9 * model["tps"])
    assert corrected["basis"].startswith("model, corrected by a measurement at abc1234")
    assert row("--nodes", "2") == across


def test_every_gpu_has_a_link() -> None:
    assert tuple(links.LINKS) == hardware.GPU_NAMES
    assert cluster_of(8, 2, link_gb_s=25.0).link("H200") == ("stated", 25e9, 3.4e-6)
    assert cluster_of(8, 2).between.bytes_per_sec == 400e9
    assert cluster_of(8, 2, node_link="100gbe").between.bytes_per_sec == 12.5e9
    assert cluster_of(8, 2, node_link_gb_s=7.0).between.bytes_per_sec == 7e9


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--gpus", "0"), "both must be at least 1"),
        (("--gpus", "8", "--nodes", "129"), "1,032 GPUs (--gpus is per node)"),
        (("--gpus", "8", "--node-link", "NDRR"), "did you mean 'NDR'?"),
        (("--gpus", "8", "--link-gb-s", "0"), "--link-gb-s 0 must be a positive"),
        (("--gpus", "8", "--node-link-gb-s", "nan"), "--node-link-gb-s nan must be a positive"),
        (("--gpus", "8", "parallel.mode=hsdp", "parallel.shard_ranks=3"), "choose a divisor"),
        (("--picture", "scale.png"), "--picture draws many GPUs"),
        (("--gpus", "8", "--gpu", "A100", "--picture", "scale.png"), "give --mfu"),
        (("--gpus", "8", "--picture", "scale.pdf"), "ends in .png"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (error,) = said(capsys, FAST, *arguments, code=2).splitlines()
    assert error.startswith("error: ") and line in error


def test_the_picture_and_its_absence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "scale.png"
    arguments = (FAST, "--gpus", "8", "--picture", str(target))
    assert f"picture: {target}" in said(capsys, *arguments)
    assert target.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "mamba3-lite[plots]" in said(capsys, *arguments, code=2)


def test_a_mode_that_does_not_divide_is_left_out_of_the_curve() -> None:
    config = replace(config_of(), shard_ranks=16)
    points = scale.curve(config, "hsdp", cluster_of(8, 1), NVLINK, 0.2)
    assert [gpus for gpus, _ in points] == [16 * 2**i for i in range(7)]
    with pytest.raises(UserError, match="choose a divisor"):
        scale.shard_ranks(config, "hsdp", cluster_of(8, 1))


def test_the_figures_of_the_guide_are_what_plan_computes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "100")
    (line,) = re.findall(r"^mamba3-lite plan (.*total_steps=100000.*)$", page, flags=re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(ROOT)
    printed = said(capsys, *line.split())
    assert [row for row in shown.splitlines() if row not in printed.splitlines()] == []
    rows = []
    for name, overrides in (("434 M", ()), ("1.3 B", BILLION), ("7 B", SEVEN_BILLION)):
        config = config_of(*overrides)
        seconds = micro_step_sec(config)
        for mode in scale.MODES:
            reached = [
                f"{scale.efficiency(config, mode, cluster_of(8, nodes), NVLINK, seconds):.1%}"
                for nodes in (1, 8, 32, 128)
            ]
            ranks = scale.shard_ranks(config, mode, cluster_of(8, 8))
            moments = scale.rank_memory(config, "fused", mode, ranks)
            peak = sum(moments[budget.fullest(moments)].values()) / 2**30
            cells = " | ".join(value.replace("%", " %") for value in reached)
            rows.append(f"| {name} | {mode} | {cells} | {peak:.1f} |")
    assert [row for row in rows if row not in page] == []
    slow, config = cluster_of(8, 8, node_link="100GbE"), config_of()
    reached = [
        f"{scale.efficiency(config, mode, slow, NVLINK, micro_step_sec(config)):.0%}"
        for mode in scale.MODES
    ]
    ddp, fsdp, hsdp = (value.replace("%", " %") for value in reached)
    assert f"{ddp} with ddp, {fsdp} with fsdp and {hsdp} with hsdp" in page
    for assumed in (f"assumed: {scale.LINK_SHARE:.0%}", f"beside {scale.HIDING:.0%} of the pass"):
        assert assumed.replace("%", " %") in page
