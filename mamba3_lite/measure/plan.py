"""What a run will take, before it starts: the command ``plan``. It needs no GPU and makes no model.

Numbers come from :mod:`mamba3_lite.measure.budget`; a speed that was not measured is the user's to
state.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mamba3_lite import hardware
from mamba3_lite.errors import UserError
from mamba3_lite.measure import budget, html, links, scale
from mamba3_lite.measure.consumption import consumption
from mamba3_lite.models import arithmetic
from mamba3_lite.models.transformer import ModelConfig
from mamba3_lite.schema import find_config, nearest
from mamba3_lite.training.config import TrainingConfig, load_training_config
from mamba3_lite.training.schedule import lr_factor

DEFAULT_GPUS = ("H200", "H100", "A100")
LOSS_AT = 2000  # the optimizer step at which `ab` compares losses
TOKENS_PER_PARAMETER = 20  # compute-optimal by arXiv 2203.15556
LONGEST_WARMUP = 0.05  # of the run
# How far a predicted peak may be from a measured one (tests/test_plan.py).
MEMORY_TOLERANCE = 0.1
_SPARKS = "▁▂▃▄▅▆▇█"
_CURVE_POINTS = 60


@dataclass(frozen=True)
class Offer:
    """A GPU and, where known, the price of an hour of it."""

    gpu: hardware.StatedGpu
    price: float | None


def data_tokens(config: TrainingConfig) -> tuple[int | None, float | None, str]:
    """Tokens of the data, epochs of the run, and where that is from."""
    if os.path.exists(config.data_path):
        use = consumption(config.data_path, config)
        return use.n_windows * config.max_seq_len, use.epochs, config.data_path
    if config.data.max_tokens:
        tokens = config.data.max_tokens
        return tokens, config.total_tokens / tokens, "data.max_tokens"
    return None, None, f"unknown: {config.data_path} is not there yet"


def make_plan(
    config: TrainingConfig,
    offers: Sequence[Offer],
    mfu: float | None,
    cluster: links.Cluster | None = None,
) -> dict[str, Any]:
    """Everything that ``plan`` shows, ready for JSON; sizes in bytes, times in hours.

    ``memory`` and ``gpus`` are of one GPU with its share of the tokens, ``many_gpus`` of a cluster.
    """
    ranks = 1 if cluster is None else cluster.ranks
    model = config.model()
    dispatch, note = budget.planned_dispatch(model)
    counts = arithmetic.parameter_counts(model)
    tokens, epochs, source = data_tokens(config)
    moments = budget.memory_moments(config, dispatch)
    whole = budget.fullest(moments)
    peaks = {
        str(choice).lower(): budget.peak_bytes(_with_checkpointing(config, choice), dispatch)
        for choice in (False, "selective", True)
    }
    gpus = [_on(offer, config, dispatch, peaks, mfu) for offer in offers]
    plan = {
        "ssd_dispatch": {"path": dispatch, "note": note},
        "parameters": {**counts, "all": sum(counts.values())},
        "tokens": {
            "micro_step": config.tokens_per_micro_step,
            "ranks": ranks,
            "opt_step": ranks * config.tokens_per_step,
            "run": ranks * config.total_tokens,
            "data": tokens,
            "data_source": source,
            "epochs": epochs and ranks * epochs,
            "per_parameter": ranks * config.total_tokens / sum(counts.values()),
        },
        "memory": {
            "moment": whole,
            "parts": moments[whole],
            "peak_bytes": sum(moments[whole].values()),
            "moments": {name: sum(parts.values()) for name, parts in moments.items()},
            "by_grad_checkpoint": peaks,
        },
        "flops_per_token": {
            "forward": arithmetic.forward_flops_per_token(model),
            "training": arithmetic.training_flops_per_token(model),
            "model": arithmetic.model_flops_per_token(model),
        },
        "gpus": gpus,
        "schedule": {
            "lr": config.lr,
            "start": config.lr * _factor(config, 0),
            "end": config.lr * _factor(config, config.max_steps),
            "warmup_steps": config.warmup_steps,
            "total_steps": config.max_steps,
        },
        "disk": {
            **budget.disk(config),
            "data_bytes": tokens and tokens * (2 if model.vocab_size <= 2**16 else 4),
        },
    }
    if cluster is not None:
        alone = [(row, offer.price) for row, offer in zip(gpus, offers, strict=True)]
        plan["many_gpus"] = scale.many_gpus(config, dispatch, alone, cluster)
    return plan


def _with_checkpointing(config: TrainingConfig, choice: bool | str) -> TrainingConfig:
    return replace(config, model_config={**config.model_config, "grad_checkpoint": choice})


def _factor(config: TrainingConfig, opt_step: int) -> float:
    return lr_factor(
        opt_step,
        warmup_steps=config.warmup_steps,
        max_steps=config.max_steps,
        min_lr_ratio=config.min_lr_ratio,
    )


def _on(
    offer: Offer, config: TrainingConfig, dispatch: str, peaks: dict[str, int], mfu: float | None
) -> dict[str, Any]:
    """What the run takes on one GPU of a kind."""
    gpu, model = offer.gpu, config.model()
    speed = (
        budget.expected_speed(config, dispatch, gpu.name)
        if mfu is None
        else budget.Speed(mfu, "stated")
    )
    facts = {
        "gpu": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "memory_share": peaks[str(model.grad_checkpoint).lower()] / gpu.memory_bytes,
        "basis": "not measured: give --mfu" if speed is None else speed.basis,
    }
    if speed is None:
        return facts
    tps = gpu.peak_bf16_flops * speed.mfu / arithmetic.model_flops_per_token(model)
    hours = config.total_tokens / tps / 3600
    cost = None if offer.price is None else hours * offer.price
    return {**facts, "mfu": speed.mfu, "tps": tps, "hours": hours, "cost": cost}


def warnings(config: TrainingConfig, plan: dict[str, Any], loss_at: int) -> list[str]:
    """What the user may not want, one sentence each."""
    note = plan["ssd_dispatch"]["note"]
    said = [note] if note and config.model().ssd_dispatch == "triton" else []
    share = config.warmup_steps / config.max_steps
    if share > LONGEST_WARMUP:
        said.append(
            f"warm-up takes {share:.0%} of the run ({config.warmup_steps:,} of "
            f"{config.max_steps:,} optimizer steps; {LONGEST_WARMUP:.0%} is much)"
        )
    if loss_at <= config.warmup_steps and loss_at <= config.max_steps:
        said.append(
            f"loss@{loss_at} lies inside the warm-up of {config.warmup_steps:,} optimizer steps: "
            "it compares warm-ups"
        )
    tokens = plan["tokens"]
    if tokens["epochs"] is not None and tokens["epochs"] > 1:
        said.append(
            f"the data are shorter than the run: {tokens['data']:,} tokens are read "
            f"{tokens['epochs']:.1f} times"
        )
    if tokens["per_parameter"] < TOKENS_PER_PARAMETER:
        said.append(
            f"{tokens['per_parameter']:.1f} tokens a parameter: at this compute a smaller model on "
            f"more tokens is expected to be better (about {TOKENS_PER_PARAMETER} are optimal)"
        )
    for row in plan["many_gpus"]["on"] if "many_gpus" in plan else plan["gpus"]:
        need = row["memory_share"] * row["memory_bytes"]
        if row["memory_share"] * (1 + MEMORY_TOLERANCE) > 1:
            verdict = "does not fit" if row["memory_share"] > 1 else "may not fit"
            said.append(
                f"{verdict} on {row['gpu']}: {_memory(need)} of {_memory(row['memory_bytes'])}; "
                "lower training.micro_batch_size, or set training.grad_checkpoint to true"
                + (", or parallel.mode to fsdp" if row.get("mode") == "ddp" else "")
            )
    parameters = plan["parameters"]["all"]
    reference = arithmetic.parameter_count(ModelConfig())
    measured = any(row["basis"].startswith("measured") for row in plan["gpus"])
    if measured and parameters < reference / 2:
        said.append(
            f"speed was measured at {reference / 1e6:.0f} M parameters; with {_short(parameters)} "
            "parameters a GPU reaches less"
        )
    return said


def sparkline(config: TrainingConfig, points: int = _CURVE_POINTS) -> str:
    """The learning rate over the run, one character a piece of it."""
    factors = [_factor(config, config.max_steps * i // (points - 1)) for i in range(points)]
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(f * len(_SPARKS)))] for f in factors)


def draw_schedule(config: TrainingConfig, figure: Any) -> None:
    """The learning rate against the optimizer step, on an empty matplotlib figure."""
    last = config.max_steps
    steps = sorted({*(last * i // 500 for i in range(501)), config.warmup_steps})
    axes = figure.subplots()
    axes.plot(steps, [config.lr * _factor(config, step) for step in steps])
    axes.axvspan(0, config.warmup_steps, alpha=0.15, label=f"warm-up, {config.warmup_steps:,}")
    axes.set(xlabel="optimizer step", ylabel="learning rate", xlim=(0, last))
    axes.set_ylim(bottom=0)
    axes.legend()


def _memory(size: float) -> str:
    """In the units of the log's ``peak_mem_gib``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _storage(size: float) -> str:
    """In the units of disks and their vendors."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _short(number: float) -> str:
    """8.0 B, 16.78 B, 31.5 M; below a million the number itself."""
    if number >= 1e9:
        return f"{number / 1e9:.2f}".removesuffix("0") + " B"
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number:,.0f}"


def _rows(title: str, *rows: Sequence[str], columns: Sequence[str] = ()) -> Table:
    """A table whose first column is its title's; the others have a name, or none."""
    table = Table(escape(title), *(columns or [""] * (len(rows[0]) - 1)))
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def tables(config: TrainingConfig, plan: dict[str, Any]) -> list[Table]:
    """What a terminal shows, in order."""
    parameters, tokens, flops = plan["parameters"], plan["tokens"], plan["flops_per_token"]
    whole = parameters["all"]
    counts = [
        (name, f"{count:,}", f"{count / whole:.1%}") for name, count in parameters.items() if count
    ]
    batch, accumulation = config.batch_size, config.gradient_accumulation_steps
    length, run = config.max_seq_len, _short(tokens["run"])
    over = "" if tokens["data"] is None else f" exposures over {_short(tokens['data'])} tokens"
    epochs = "" if tokens["epochs"] is None else f" = {tokens['epochs']:.1f} epochs"
    per_parameter = f"{tokens['per_parameter']:.1f} ({TOKENS_PER_PARAMETER} are compute-optimal)"
    memory, path = plan["memory"], plan["ssd_dispatch"]["path"]
    peaks = memory["by_grad_checkpoint"]
    disk, ranks = plan["disk"], tokens["ranks"]
    by_ranks = f" x {ranks:,} ranks" if ranks > 1 else ""
    need = [
        _rows(
            f"GPU memory, {path}, {'' if config.compile_model else 'not '}compiled",
            *((name, _memory(size)) for name, size in memory["parts"].items()),
            (f"peak, at {memory['moment']}", _memory(memory["peak_bytes"])),
            *((f"with grad_checkpoint: {name}", _memory(size)) for name, size in peaks.items()),
        ),
        _gpu_table(plan["gpus"]),
    ]
    if "many_gpus" in plan:
        many = scale.tables(plan["many_gpus"])
        need = [_rows(title, *rows, columns=columns) for title, columns, rows in many]
    return [
        _rows("parameters", *counts),
        _rows(
            "tokens",
            ("micro-step", f"{batch} x {length:,} = {tokens['micro_step']:,}"),
            (
                "optimizer step",
                f"{batch} x {accumulation} x {length:,}{by_ranks} = {tokens['opt_step']:,}",
            ),
            ("run", f"{tokens['opt_step']:,} x {config.max_steps:,} = {run}{over}{epochs}"),
            ("data from", tokens["data_source"]),
            ("exposures a parameter", per_parameter),
        ),
        _rows(
            "MFLOP a token",
            ("forward", f"{flops['forward'] / 1e6:,.1f}"),
            ("training, recomputation included", f"{flops['training'] / 1e6:,.1f}"),
            ("model (6 W), what MFU counts", f"{flops['model'] / 1e6:,.1f}"),
        ),
        *need,
        _rows(
            "disk",
            *((f"checkpoint: {k}", _storage(v)) for k, v in disk["checkpoint_bytes"].items()),
            ("checkpoints", f"{disk['saved']:,} saved, {disk['kept']:,} kept"),
            ("checkpoints at most", _storage(disk["needed_bytes"])),
            ("data", "unknown" if disk["data_bytes"] is None else _storage(disk["data_bytes"])),
        ),
    ]


def _gpu_table(gpus: Sequence[dict[str, Any]]) -> Table:
    """One row a GPU, with a column of cost where any has a price."""
    priced = any(row.get("cost") is not None for row in gpus)
    table = Table("1 GPU", "memory", "MFU", "tok/s", "hours", *(["cost"] if priced else []), "from")
    for row in gpus:
        figures = ["-"] * (4 if priced else 3)
        if "mfu" in row:
            figures = [f"{row['mfu']:.1%}", f"{row['tps']:,.0f}", f"{row['hours']:,.2f}"]
            figures += [f"{row['cost']:,.2f}"] if priced else []
        memory = f"{row['memory_share']:.0%} of {row['memory_bytes'] / 1e9:.0f} GB"
        table.add_row(row["gpu"], memory, *figures, row["basis"])
    return table


def _offers(
    names: Sequence[str] | None, prices: Sequence[float] | None, mfu: float | None
) -> list[Offer]:
    """The GPUs asked for, each with its price: one price for all, or one for each."""
    offers = []
    names, prices = list(names or DEFAULT_GPUS), list(prices or [])
    if len(prices) not in (0, 1, len(names)):
        raise UserError(
            f"{len(prices)} --price for {len(names)} GPUs ({', '.join(names)}); give one for all, "
            "or one for each --gpu in their order."
        )
    if any(not 0 <= price < float("inf") for price in prices):
        raise UserError("--price must be 0 or more: what one hour of one GPU costs.")
    if mfu is not None and not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu:g} must lie between 0 and 1, such as 0.4.")
    for i, name in enumerate(names):
        gpu = hardware.stated_gpu(name)
        if gpu is None:
            raise UserError(
                f"--gpu {name!r} is unknown{nearest(name, hardware.GPU_NAMES)}; "
                f"known are {', '.join(hardware.GPU_NAMES)}."
            )
        offers.append(Offer(gpu, prices[min(i, len(prices) - 1)] if prices else None))
    return offers


def _save_picture(draw: html.Draw, option: str, target: str) -> None:
    path = Path(target)
    if path.suffix.lower() != ".png":
        raise UserError(f"{option} {target}: the picture is a PNG; give a name that ends in .png")
    try:
        drawn = html.save_picture(draw, path)
    except OSError as problem:
        raise UserError(f"{option} {target}: cannot be written ({problem.strerror})") from problem
    if not drawn:
        raise UserError(f'{option} needs matplotlib; run pip install "mamba3-lite[plots]"')


def _save_efficiency(
    config: TrainingConfig, plan: dict[str, Any], cluster: links.Cluster | None, target: str
) -> None:
    """Of the first GPU whose speed is known."""
    if cluster is None:
        raise UserError("--picture draws many GPUs: give --gpus, those of a node.")
    row = next((row for row in plan["gpus"] if "tps" in row), None)
    if row is None:
        raise UserError("--picture needs the speed of one GPU, which was not measured: give --mfu.")

    def draw(figure: Any) -> None:
        scale.draw_efficiency(config, row, cluster, figure)

    _save_picture(draw, "--picture", target)


def plan_command(
    config: Annotated[str, typer.Argument(help="Training YAML.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, such as training.lr=6e-4.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help=f"GPU by name, may be repeated; default: {', '.join(DEFAULT_GPUS)}."),
    ] = None,
    price: Annotated[
        list[float] | None,
        typer.Option(help="Price of a GPU-hour: one for all, or one for each --gpu."),
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(help="Reckon with this MFU instead of a measured one: 0.4.")
    ] = None,
    loss_at: Annotated[
        int, typer.Option(help="Optimizer step whose loss will be compared.")
    ] = LOSS_AT,
    plot: Annotated[
        str | None, typer.Option(help="Also draw the learning rate into this PNG file.")
    ] = None,
    gpus: links.GpusOption = 1,
    nodes: links.NodesOption = 1,
    node_link: links.NodeLinkOption = "NDR",
    link_gb_s: links.LinkSpeedOption = None,
    node_link_gb_s: links.NodeLinkSpeedOption = None,
    picture: links.PictureOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a run will take: tokens, memory, hours, cost, disk. Needs no GPU, takes seconds.

    Memory is for one CUDA GPU with Triton under bf16 autocast. Speed comes from a recorded training
    step of that GPU, or from --mfu. With --gpus and --nodes both are of each of many GPUs, by a
    model of what they exchange.

    Examples:

    mamba3-lite plan configs/pretrain_h200_434m.yaml

    mamba3-lite plan configs/pretrain_a100_400m.yaml --gpu A100 --mfu 0.4 --price 1.8

    mamba3-lite plan configs/pretrain_h200_434m.yaml training.micro_batch_size=32 --json

    mamba3-lite plan configs/pretrain_h200_434m.yaml --gpu H200 --gpus 8 --nodes 4
    """
    if loss_at < 1:
        raise UserError(f"--loss-at {loss_at} must be an optimizer step, 1 or later.")
    settings, _ = load_training_config(find_config(config), list(overrides or []))
    # Everything that can be refused comes before the first line.
    cluster = links.asked_cluster(gpus, nodes, node_link, link_gb_s, node_link_gb_s)
    plan = make_plan(settings, _offers(gpu, price, mfu), mfu, cluster)
    plan = {"config": config, **plan, "warnings": warnings(settings, plan, loss_at)}
    if plot is not None:
        _save_picture(lambda figure: draw_schedule(settings, figure), "--plot", plot)
    if picture is not None:
        _save_efficiency(settings, plan, cluster, picture)
    if as_json:
        print(json.dumps(plan, indent=2))
        return
    _show(settings, plan)
    for drawn in filter(None, (plot, picture)):
        print(f"picture: {drawn}")


def _show(settings: TrainingConfig, plan: dict[str, Any]) -> None:
    console = Console()
    for table in tables(settings, plan):
        console.print(table)
    schedule = plan["schedule"]
    print(
        f"learning rate: {schedule['start']:.1e} to {schedule['lr']:.1e} over "
        f"{schedule['warmup_steps']:,} optimizer steps, then to {schedule['end']:.1e} at "
        f"{schedule['total_steps']:,}"
    )
    print(sparkline(settings))
    for note in scale.notes(settings, plan["many_gpus"]) if "many_gpus" in plan else ():
        print(note)
    if plan["ssd_dispatch"]["note"] and settings.model().ssd_dispatch == "auto":
        print(plan["ssd_dispatch"]["note"])
    for warning in plan["warnings"]:
        print(f"[warn] {warning}")
