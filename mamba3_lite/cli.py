"""The command ``mamba3-lite``: a table of subcommands, each imported when it is chosen."""

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mamba3_lite import __version__
from mamba3_lite.errors import UserError, user_errors_as_one_line

# name: (where its function lives, what the overview says)
COMMANDS = {
    "quickstart": (
        "mamba3_lite.quickstart:quickstart_command",
        "Train a small model on Python's own standard library, in minutes.",
    ),
    "prepare": (
        "mamba3_lite.data.prepare:prepare_command",
        "Turn text into token shards: files, Parquet, data sets, weighted mixes.",
    ),
    "inspect": (
        "mamba3_lite.measure.consumption:inspect_command",
        "Show what prepared data hold, and what a run would consume.",
    ),
    "plan": (
        "mamba3_lite.measure.plan:plan_command",
        "Show what a run will take: tokens, memory, hours, cost, disk.",
    ),
    "doctor": (
        "mamba3_lite.measure.doctor:doctor_command",
        "Say whether this machine can train, and what each SSD path does here.",
    ),
    "pretrain": (
        "mamba3_lite.training.command:pretrain_command",
        "Pretrain a model from a YAML configuration; resumes by itself.",
    ),
    "report": (
        "mamba3_lite.measure.report:report_command",
        "Show runs as figures and one page that reads well on a phone.",
    ),
    "generate": (
        "mamba3_lite.inference.generate:generate_command",
        "Continue a prompt with a trained model.",
    ),
    "eval": (
        "mamba3_lite.evaluation.command:eval_command",
        "Evaluate a trained model: perplexity, harness tasks, multiple choice.",
    ),
    "bench": (
        "mamba3_lite.measure.bench:bench_command",
        "Time operators, training step, loader and decoding, against a baseline.",
    ),
    "export": (
        "mamba3_lite.export.hf:export_command",
        "Write a folder that transformers loads without this package.",
    ),
    "import": (
        "mamba3_lite.export.foreign:import_command",
        "Turn a published checkpoint into a run folder.",
    ),
    "convert": (
        "mamba3_lite.export.convert:convert_command",
        "Copy a checkpoint in the other layout: three files, or a part for each rank.",
    ),
    "ab": (
        "mamba3_lite.measure.ab:ab_command",
        "Compare configurations that differ in one key: speed, loss, memory.",
    ),
    "parity": (
        "mamba3_lite.measure.parity:parity_command",
        "Compare every SSD path with the float64 oracle.",
    ),
}


class _LazyGroup(TyperGroup):
    """Imports a subcommand's module when that subcommand runs, so that --help stays instant."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            from mamba3_lite.schema import nearest

            raise UserError(
                f"unknown command {cmd_name!r}{nearest(cmd_name, COMMANDS)}; "
                f"commands: {', '.join(COMMANDS)} (see mamba3-lite --help)."
            )
        where, summary = COMMANDS[cmd_name]
        if ctx.meta.get("overview"):
            return TyperCommand(cmd_name, help=summary)
        module, function = where.split(":")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(cmd_name)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(app)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta["overview"] = True
        super().format_help(ctx, formatter)


app = typer.Typer(cls=_LazyGroup, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True, no_args_is_help=True)
def overview(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Pretrain a language model built on a complex-valued SSD mixer. Measure, don't guess.

    Examples:

    mamba3-lite quickstart

    mamba3-lite prepare --help

    mamba3-lite pretrain --config configs/pretrain_a100_400m.yaml --dry-run --no-compile
    """
    if version:
        print(f"mamba3-lite {__version__}")


def main(argv: list[str] | None = None) -> None:
    """Console entry point."""
    with user_errors_as_one_line():
        app(argv)


if __name__ == "__main__":
    main()
