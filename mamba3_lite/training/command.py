"""The command `pretrain`."""

import dataclasses
from typing import Annotated, Any

import typer

from mamba3_lite.distributed.world import join_world
from mamba3_lite.schema import COMMAND_LINE, find_config
from mamba3_lite.training.config import load_training_config, yaml_key
from mamba3_lite.training.pretrain import Pretrainer

DEFAULT_CONFIG = "configs/pretrain_a100_400m.yaml"


def pretrain_command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, such as training.lr=6e-4.")
    ] = None,
    config: Annotated[str, typer.Option(help="YAML configuration.")] = DEFAULT_CONFIG,
    data_path: Annotated[str | None, typer.Option(help="Training data.")] = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Run folder.")] = None,
    resume: Annotated[
        int | None,
        typer.Option(help="Resume from exactly this optimizer step; default: the newest."),
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(help="Start a new run from these weights: run folder or export.")
    ] = None,
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Gradient checkpointing off.")
    ] = False,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Skip torch.compile.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Two optimizer steps; the run folder is left alone.")
    ] = False,
    full_shape: Annotated[
        bool, typer.Option("--full-shape", help="Dry run on a CPU: keep the literal shape.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace a few micro-steps into the run folder.")
    ] = False,
    max_time: Annotated[
        float | None, typer.Option(help="Save and exit with code 75 after this many seconds.")
    ] = None,
) -> None:
    """Pretrain a model; a run folder that holds checkpoints is resumed.

    Examples:

    mamba3-lite pretrain --config configs/debug_cpu.yaml

    mamba3-lite pretrain --config configs/pretrain_a100_400m.yaml --dry-run --no-compile

    mamba3-lite pretrain --config run.yaml training.lr=6e-4 model.chunk_size=128

    Exit codes: 0 finished, 2 user error, 124 hung; saved: 75 out of --max-time or SIGUSR1,
    130 SIGINT, 143 SIGTERM.
    """
    settings, sources = load_training_config(find_config(config), list(overrides or []))
    changes: dict[str, Any] = {
        "data_path": data_path,
        "checkpoint_dir": checkpoint_dir,
        "init_from": init_from,
        "max_time_sec": max_time,
        "grad_checkpoint": False if no_checkpoint else None,
        "compile_model": False if no_compile else None,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    sources |= {yaml_key(name): COMMAND_LINE for name in changes}
    explicit = settings.model_config.get("grad_checkpoint")
    if no_checkpoint and explicit:
        print(f"[warn] model.grad_checkpoint: {explicit} is explicit and wins over --no-checkpoint")
    settings = dataclasses.replace(settings, **changes)
    with join_world(settings.rank_timeout_sec) as world:
        # No name for the trainer: it has to be gone when the group is destroyed.
        code = Pretrainer(
            settings, resume=resume, dry_run=dry_run, full_shape=full_shape, profile=profile,
            sources=sources, world=world,
        ).train()  # fmt: skip
        # Once one has left with a code, torchrun ends the others: not before files are closed.
        world.gather(None)
    raise typer.Exit(code)
