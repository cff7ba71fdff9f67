"""What a run takes on many GPUs: memory of a rank, bytes exchanged, efficiency. A model on paper.

Measured is only the speed of one GPU (:mod:`mamba3_lite.measure.budget`). The exchanges are those
of :mod:`mamba3_lite.training.parallel`, call by call: ``tests/test_scale.py`` records what it
sends. Times follow from stated link speeds and from the assumptions below. A measured correction
has one place, ``MEASURED``.

An exchange is among k ranks, of which a node holds some. Each sends (k-1)/k of the bytes in an
all-gather or a reduce-scatter, and twice that in an all-reduce; a ring over several nodes sends as
much out of every node as each of its ranks sends.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from mamba3_lite import hardware
from mamba3_lite.errors import UserError
from mamba3_lite.measure import budget
from mamba3_lite.measure.links import MOST_GPUS, Cluster, Link
from mamba3_lite.models import arithmetic
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.training import parallel
from mamba3_lite.training.config import TrainingConfig

MODES = ("ddp", "fsdp", "hsdp")

# Assumptions: of a link's stated speed, what a large exchange gets; of the time a pass computes,
# what an exchange can run beside (the rest is for starting, and for what they take of each other).
LINK_SHARE = 0.8
HIDING = 0.8


class Factor(NamedTuple):
    """What a recorded run on several GPUs reached, over what this model says."""

    mode: str
    several_nodes: bool
    factor: float
    commit: str


# Rows of benchmarks/results belong here as soon as there are some.
MEASURED: tuple[Factor, ...] = ()


def planned_mode(config: TrainingConfig, gpu: hardware.StatedGpu, cluster: Cluster) -> str:
    """As ``training/parallel.py:chosen_mode``, with the memory of the data sheet."""
    if config.parallel_mode != "auto":
        return config.parallel_mode
    needed = parallel._BYTES_PER_PARAMETER * arithmetic.parameter_count(config.model())
    if needed <= parallel._SHARE_OF_MEMORY * gpu.memory_bytes:
        return "ddp"
    return "hsdp" if cluster.nodes > 1 else "fsdp"


def shard_ranks(config: TrainingConfig, mode: str, cluster: Cluster) -> int:
    """Ranks among which one copy of the model is cut; ``UserError`` where they do not divide."""
    if mode != "hsdp":
        return cluster.ranks if mode == "fsdp" else 1
    ranks = config.shard_ranks or cluster.gpus
    if cluster.ranks % ranks:
        raise UserError(
            f"parallel.shard_ranks: {cluster.ranks} ranks cannot be divided into groups of {ranks};"
            " choose a divisor."
        )
    return ranks


class Cut(NamedTuple):
    """Float32 bytes of the groups that FSDP gathers whole, rows padded to what divides.

    Attributes:
        block: one of the blocks, A apart.
        root: embedding, final norm and head.
        a: of all blocks, which every rank holds whole.
    """

    block: int
    root: int
    a: int


def cut(model: ModelConfig, ranks: int) -> Cut:
    """The groups of a model whose rows are cut among ``ranks``; 1 pads nothing."""
    d, heads, ffn = model.d_model, model.n_heads, model.ffn_dim
    width = heads * model.head_dim
    projected = heads * (model.head_dim + 4 * model.state_dim + 1)

    def size(*matrices: tuple[int, int]) -> int:
        return sum(4 * columns * ranks * -(-rows // ranks) for rows, columns in matrices)

    norm, table = (d, 1), (model.vocab_size, d)
    block = size((projected, d), (width, width), (d, width), (2 * ffn, d), (d, ffn), norm, norm)
    root = size(table, norm, *([] if model.weight_tying else [table]))
    return Cut(block, root, 8 * model.n_layers * heads)


_WEIGHTS, _MOMENTS, _GRADIENTS = "weights, float32", "AdamW moments, float32", "gradients, float32"


def rank_memory(
    config: TrainingConfig, dispatch: str, mode: str, ranks_of_copy: int
) -> dict[str, dict[str, int]]:
    """As :func:`mamba3_lite.measure.budget.memory_moments`, for one of many ranks.

    ddp keeps every gradient in its buckets at all times. fsdp and hsdp hold a share of weights,
    moments and gradients; whole are the root group from forward to backward, two blocks and a
    buffer, in the backward pass the gradients of a block, twice, and that of the head; and within
    an accumulation window, which exchanges only at its end, every gradient.
    """
    accumulates = config.gradient_accumulation_steps > 1
    if mode == "ddp":
        always = replace(config, gradient_accumulation_steps=2)
        return budget.memory_moments(always, dispatch)
    model = config.model()
    groups = cut(model, ranks_of_copy)
    share = (model.n_layers * groups.block + groups.root) // ranks_of_copy + groups.a
    whole = arithmetic.weight_bytes(model)
    at_work = 2 * groups.block + 4 * model.vocab_size * model.d_model
    # At the head, in the backward pass of the last block, and in that of the first.
    gradients = [0, at_work, share + at_work]
    if accumulates:
        gradients = [whole, whole + at_work, whole + at_work]
    gathered = [groups.root, groups.root + 3 * groups.block, groups.root + 3 * groups.block]
    alone = budget.memory_moments(config, dispatch)
    moments = {}
    for (name, parts), gradient, weights in zip(alone.items(), gradients, gathered, strict=True):
        rest = {n: v for n, v in parts.items() if n not in (_WEIGHTS, _MOMENTS, _GRADIENTS)}
        held = {
            "weights, float32, a share": share, "AdamW moments, float32, a share": 2 * share,
            "weights, float32, gathered": weights, _GRADIENTS: gradient,
        }  # fmt: skip
        moments[name] = {n: v for n, v in {**held, **rest}.items() if v}
    return moments


class Group(NamedTuple):
    """Ranks that exchange: how many, and how many of them a node holds."""

    size: int
    on_node: int

    @property
    def nodes(self) -> int:
        """That they are on."""
        return -(-self.size // self.on_node)


class Exchange(NamedTuple):
    """Collectives of one kind in one pass.

    Attributes:
        kind: all-gather, reduce-scatter or all-reduce.
        payload: bytes of the whole tensors, of all calls.
        beside: what it can hide behind: forward, backward, "last backward" (of an accumulation
            window); alone: nothing.
        passes: of an optimizer step.
    """

    kind: str
    group: Group
    payload: float
    calls: int
    beside: str
    passes: int = 1

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a pass."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.payload * (self.group.size - 1) / self.group.size

    def leaves_node(self, gpus: int) -> float:
        """Bytes that a node of so many GPUs sends to others in a pass."""
        groups_of_node = gpus / self.group.on_node
        return groups_of_node * self.sent if self.group.nodes > 1 else 0.0

    def seconds(self, cluster: Cluster, link: Link) -> float:
        """Of a pass. All groups exchange at once and share what leads out of their nodes."""
        size, on_node, nodes = *self.group, self.group.nodes
        inside = self.sent / link.bytes_per_sec if on_node > 1 else 0.0
        outside = self.leaves_node(cluster.gpus) / cluster.between.bytes_per_sec
        network = cluster.between.hop_sec
        hops = (size - nodes) * link.hop_sec + (nodes - 1) * network
        if self.kind == "all-reduce":
            # There NCCL has trees over the nodes too, and takes what is faster.
            tree = (on_node - 1) * link.hop_sec + math.ceil(math.log2(nodes)) * network
            hops = 2 * min(hops, tree)
        return max(inside, outside) / LINK_SHARE + self.calls * hops


def exchanges(config: TrainingConfig, mode: str, cluster: Cluster) -> list[Exchange]:
    """All of an optimizer step.

    The first gather of a pass has nothing to hide behind, and neither has what a backward pass
    makes last: the gradients of the first block and of the embedding.
    """
    model, passes = config.model(), config.gradient_accumulation_steps
    everyone = Group(cluster.ranks, cluster.gpus)
    counts = Exchange("all-reduce", everyone, 16, 1, "alone")  # loss and tokens, float64
    if mode == "ddp":
        embedding = 4 * model.vocab_size * model.d_model
        rest = arithmetic.weight_bytes(model) - embedding
        # A bucket is full at 25 MiB, and holds one matrix at least.
        buckets = min(math.ceil(rest / (25 * 2**20)), 5 * model.n_layers + 1)
        return [
            Exchange("all-reduce", everyone, rest, buckets, "last backward"),
            Exchange("all-reduce", everyone, embedding, 1, "alone"),
            counts,
        ]
    ranks, others = shard_ranks(config, mode, cluster), model.n_layers - 1
    block, root, a = cut(model, ranks)
    shards = Group(ranks, math.gcd(ranks, cluster.gpus))
    found = [
        Exchange("all-gather", shards, others * block, others, "forward", passes),
        Exchange("all-gather", shards, others * block, others, "backward", passes),
        Exchange("all-gather", shards, root + 2 * block, 3, "alone", passes),
        Exchange("reduce-scatter", shards, others * block, others, "last backward"),
        Exchange("reduce-scatter", shards, root + block, 2, "alone"),
        Exchange("all-reduce", everyone, a, 1, "alone"),
        Exchange("all-reduce", shards, 4, 1, "alone"),  # the gradients' norm
        counts,
    ]
    if mode == "hsdp":
        copies = Group(cluster.ranks // ranks, max(1, cluster.gpus // ranks))
        found += [
            Exchange("all-reduce", copies, others * block / ranks, others, "last backward"),
            Exchange("all-reduce", copies, (root + block) / ranks, 2, "alone"),
        ]
    return [exchange for exchange in found if exchange.group.size > 1]


def volume(found: list[Exchange], gpus: int) -> dict[str, dict[str, float]]:
    """By kind, of an optimizer step: bytes that a GPU sends and that leave a node, and calls."""
    kinds = {
        exchange.kind: {"sent_bytes": 0.0, "leaves_node_bytes": 0.0, "calls": 0}
        for exchange in found
    }
    for exchange in found:
        total = kinds[exchange.kind]
        total["sent_bytes"] += exchange.passes * exchange.sent
        total["leaves_node_bytes"] += exchange.passes * exchange.leaves_node(gpus)
        total["calls"] += exchange.passes * exchange.calls
    return kinds


class StepTime(NamedTuple):
    """Seconds of an optimizer step: computing, all exchanges, and of those what is not hidden."""

    compute: float
    exchange: float
    exposed: float


def step_time(
    config: TrainingConfig, mode: str, cluster: Cluster, link: Link, micro_step_sec: float
) -> StepTime:
    """Of one optimizer step on a cluster.

    Args:
        link: within a node.
        micro_step_sec: of one GPU alone. Its update is in there: shorter on a share of the weights,
            which is not credited.
    """
    model, window = config.model(), config.gradient_accumulation_steps
    forward = micro_step_sec * (
        arithmetic.forward_flops_per_token(model) / arithmetic.training_flops_per_token(model)
    )
    backward = micro_step_sec - forward
    found = exchanges(config, mode, cluster)
    of_pass = {"forward": 0.0, "backward": 0.0, "last backward": 0.0, "alone": 0.0}
    total = 0.0
    for exchange in found:
        seconds = exchange.seconds(cluster, link)
        total += exchange.passes * seconds
        of_pass[exchange.beside] += seconds * (exchange.passes if exchange.beside == "alone" else 1)
    in_last = of_pass["backward"] + of_pass["last backward"]
    exposed = of_pass["alone"]
    exposed += window * max(0.0, of_pass["forward"] - HIDING * forward)
    exposed += (window - 1) * max(0.0, of_pass["backward"] - HIDING * backward)
    exposed += max(0.0, in_last - HIDING * backward)
    return StepTime(window * micro_step_sec, total, exposed)


def correction(mode: str, cluster: Cluster) -> tuple[float, str]:
    """The factor that a recorded run has found, and what a result with it is."""
    for row in MEASURED:
        if (row.mode, row.several_nodes) == (mode, cluster.nodes > 1):
            return row.factor, f"model, corrected by a measurement at {row.commit}"
    return 1.0, "model, not measured"


def efficiency(
    config: TrainingConfig, mode: str, cluster: Cluster, link: Link, micro_step_sec: float
) -> float:
    """Tokens a second of the cluster, over those of as many GPUs that need not exchange."""
    time = step_time(config, mode, cluster, link, micro_step_sec)
    factor = correction(mode, cluster)[0]
    return min(1.0, factor * time.compute / (time.compute + time.exposed))


def many_gpus(
    config: TrainingConfig,
    dispatch: str,
    alone: list[tuple[dict[str, Any], float | None]],
    cluster: Cluster,
) -> dict[str, Any]:
    """What ``plan`` shows of a cluster, ready for JSON; bytes, seconds, hours.

    Args:
        alone: for each GPU its row of the plan, and the price of its hour.
    """
    rows = [_on(config, dispatch, row, price, cluster) for row, price in alone]
    modes = {row["mode"]: row["shard_ranks"] for row in rows}
    shown = {}
    for mode, ranks in modes.items():
        moments = rank_memory(config, dispatch, mode, ranks)
        whole = budget.fullest(moments)
        shown[mode] = {
            "shard_ranks": ranks,
            "memory": {"moment": whole, "parts": moments[whole]},
            "exchange": volume(exchanges(config, mode, cluster), cluster.gpus),
        }
    return {
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "node_link": {"name": cluster.between.name, "bytes_per_sec": cluster.between.bytes_per_sec},
        "assumed": {"link_share": LINK_SHARE, "hiding": HIDING},
        "modes": shown,
        "on": rows,
    }


def _on(
    config: TrainingConfig,
    dispatch: str,
    alone: dict[str, Any],
    price: float | None,
    cluster: Cluster,
) -> dict[str, Any]:
    gpu = hardware.stated_gpu(alone["gpu"])
    assert gpu is not None
    mode, link = planned_mode(config, gpu, cluster), cluster.link(gpu.name)
    ranks = shard_ranks(config, mode, cluster)
    moments = rank_memory(config, dispatch, mode, ranks)
    peak = sum(moments[budget.fullest(moments)].values())
    facts = {
        "gpu": gpu.name, "mode": mode, "shard_ranks": ranks,
        "link": {"name": link.name, "bytes_per_sec": link.bytes_per_sec},
        "memory_bytes": gpu.memory_bytes, "memory_share": peak / gpu.memory_bytes,
        "basis": alone["basis"],
    }  # fmt: skip
    if "tps" not in alone:
        return facts
    micro_step_sec = config.tokens_per_micro_step / alone["tps"]
    time = step_time(config, mode, cluster, link, micro_step_sec)
    reached = efficiency(config, mode, cluster, link, micro_step_sec)
    step_sec = time.compute / reached
    hours = step_sec * config.max_steps / 3600
    return {
        **facts,
        "exchange_sec": time.exchange,
        "exposed_sec": time.exposed,
        "step_sec": step_sec,
        "efficiency": reached,
        "tps": cluster.ranks * config.tokens_per_step / step_sec,
        "hours": hours,
        "cost": None if price is None else hours * price * cluster.ranks,
        "basis": f"{correction(mode, cluster)[1]}; one GPU: {alone['basis']}",
    }


def tables(many: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """For a terminal: title, further columns, rows of each table."""
    shown = []
    for mode, facts in many["modes"].items():
        copy = f", {facts['shard_ranks']} ranks a copy" if mode != "ddp" else ""
        memory = facts["memory"]
        rows = [[name, f"{size / 2**30:,.2f} GiB"] for name, size in memory["parts"].items()]
        peak = sum(memory["parts"].values()) / 2**30
        rows.append([f"peak, at {memory['moment']}", f"{peak:,.2f} GiB"])
        shown.append((f"GPU memory of a rank, {mode}{copy}", [""], rows))
        rows = [
            [
                kind,
                _size(total["sent_bytes"]),
                _size(total["leaves_node_bytes"]),
                f"{total['calls']:,}",
            ]
            for kind, total in facts["exchange"].items()
        ]
        columns = ["a GPU sends", "leaves a node", "calls"]
        shown.append((f"exchanged in an optimizer step, {mode}", columns, rows))
    on = many["on"]
    rows = [[label, *(show(row) for row in on)] for label, show in _FACTS.items()]
    rows = [row for row in rows if row[0] != "cost" or any(cell != "-" for cell in row[1:])]
    title = f"{many['ranks']:,} GPUs: {many['nodes']} x {many['gpus']}"
    return [*shown, (title, [row["gpu"] for row in on], rows)]


def _size(size: float) -> str:
    if size == 0:
        return "0"
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"


def _speed(link: dict[str, Any]) -> str:
    return f"{link['name']}: {link['bytes_per_sec'] / 1e9:g} GB/s"


def _figure(name: str, form: str, unit: float = 1.0) -> Callable[[dict[str, Any]], str]:
    """Shows one number of a row, and a dash where the speed or the price is not known."""
    return lambda row: "-" if row.get(name) is None else format(row[name] * unit, form)


_FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "mode": lambda row: row["mode"],
    "memory": lambda row: f"{row['memory_share']:.0%} of {row['memory_bytes'] / 1e9:.0f} GB",
    "within a node": lambda row: _speed(row["link"]),
    "step, ms": _figure("step_sec", ",.0f", 1e3),
    "exchanges, ms": _figure("exchange_sec", ",.1f", 1e3),
    "not hidden, ms": _figure("exposed_sec", ",.1f", 1e3),
    "efficiency": _figure("efficiency", ".1%"),
    "tok/s": _figure("tps", ",.0f"),
    "hours": _figure("hours", ",.2f"),
    "cost": _figure("cost", ",.2f"),
    "from": lambda row: row["basis"],
}


def notes(config: TrainingConfig, many: dict[str, Any]) -> list[str]:
    """What the tables rest on, a line each."""
    between, ranks = many["node_link"], many["ranks"]
    lines = [
        f"efficiency: tok/s over that of {ranks:,} GPUs without exchanges. Assumed: exchanges get "
        f"{LINK_SHARE:.0%} of a stated speed and hide behind {HIDING:.0%} of a pass, and no rank "
        "is slower than another",
        f"an optimizer step takes {ranks:,} times the tokens of one GPU; for as many in all set "
        f"training.total_steps={math.ceil(config.max_steps / ranks)}",
    ]
    if many["nodes"] > 1:
        lines.insert(0, f"between nodes: {_speed(between)} out of a node")
    return lines


def curve(
    config: TrainingConfig, mode: str, cluster: Cluster, link: Link, micro_step_sec: float
) -> list[tuple[int, float]]:
    """(GPUs, efficiency) from one GPU to the most, doubling: first in a node, then the nodes."""
    within = [2**i for i in range(cluster.gpus.bit_length()) if 2**i < cluster.gpus]
    nodes = [2**i for i in range(MOST_GPUS.bit_length()) if 2**i * cluster.gpus <= MOST_GPUS]
    sizes = [(gpus, 1) for gpus in within] + [(cluster.gpus, n) for n in nodes]
    points = []
    for gpus, n in sizes:
        at = replace(cluster, gpus=gpus, nodes=n)
        if mode != "hsdp" or at.ranks % (config.shard_ranks or gpus) == 0:
            points.append((at.ranks, efficiency(config, mode, at, link, micro_step_sec)))
    return points


def draw_efficiency(
    config: TrainingConfig, row: dict[str, Any], cluster: Cluster, figure: Any
) -> None:
    """Efficiency against GPUs for all modes, on an empty matplotlib figure.

    Args:
        row: of a GPU alone, in the plan, with its speed.
    """
    axes = figure.subplots()
    micro_step_sec = config.tokens_per_micro_step / row["tps"]
    for mode, style in zip(MODES, ("o-", "s-", "^--"), strict=True):
        points = curve(config, mode, cluster, cluster.link(row["gpu"]), micro_step_sec)
        axes.plot(*zip(*points, strict=True), style, markersize=3, label=mode)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**i for i in range(0, MOST_GPUS.bit_length(), 2)])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(
        xlabel=f"GPUs ({row['gpu']}, {cluster.gpus} a node)",
        ylabel="efficiency (model)",
    )
    axes.set_ylim(0, 1.05)
    axes.legend()
