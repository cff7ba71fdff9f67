"""What a training configuration would consume of prepared data, and the command `inspect`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mamba3_lite.data import inspect
from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.schema import find_config
from mamba3_lite.training.config import TrainingConfig, load_training_config


@dataclass(frozen=True)
class Consumption:
    """A run of `config` over `n_windows` windows of its max_seq_len tokens."""

    config: TrainingConfig
    n_windows: int

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps until every window has been read once."""
        return self.n_windows / self.config.samples_per_step

    @property
    def epochs(self) -> float:
        """How often the run reads every window."""
        return self.config.max_steps / self.steps_per_epoch


def consumption(path: str | Path, config: TrainingConfig) -> Consumption:
    """Opens the data as the run would; `UserError` for data that the run would refuse."""
    data = PretrainDataset(
        path,
        config.max_seq_len,
        config.vocab_size,
        document_mode=config.document_mode,
        mask_boundary_targets=config.mask_boundary_targets,
        tokenizer=config.data.tokenizer,
    )
    return Consumption(config, data.n_windows)


def consumption_table(use: Consumption, name: str) -> Table:
    """One row a number."""
    config, table = use.config, Table(escape(name), "")
    for row in (
        ("tokens per optimizer step", f"{config.tokens_per_step:,}"),
        ("optimizer steps", f"{config.max_steps:,}"),
        ("tokens of the run", f"{config.total_tokens:,}"),
        ("windows an epoch", f"{use.n_windows:,} of {config.max_seq_len:,} tokens"),
        ("optimizer steps an epoch", f"{use.steps_per_epoch:,.1f}"),
        ("epochs", f"{use.epochs:,.2f}"),
    ):
        table.add_row(*row)
    return table


def inspect_command(
    path: Annotated[
        str, typer.Argument(help="Data: an output of prepare, a folder of shards, or one file.")
    ],
    config: Annotated[
        str | None, typer.Option(help="Training YAML: what its run would consume.")
    ] = None,
    at: Annotated[int, typer.Option(help="Token position of the decoded sample.")] = 0,
    plot: Annotated[
        str | None, typer.Option(help="Also write the length histogram to this PNG file.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="'gpt2' or a tokenizer.json; default: the one that the data name."),
    ] = None,
) -> None:
    """Show what data hold: tokens, documents, lengths, sources, and the text at a position.

    Of an output of prepare both splits are shown; the sample, the picture and the consumption are
    of the training split.

    Examples:

    mamba3-lite inspect data/mine

    mamba3-lite inspect data/mine/train --at 100000 --plot lengths.png

    mamba3-lite inspect data/mine/train --config configs/pretrain_a100_400m.yaml
    """
    settings = None if config is None else load_training_config(find_config(config))[0]
    fallback = "gpt2" if settings is None else settings.data.tokenizer
    splits = [
        inspect.Inspection(split, tokenizer=tokenizer, fallback=fallback)
        for split in inspect.splits_of(path)
    ]
    train = splits[0]
    # Everything that can be refused comes before the first line.
    sample = train.sample(at)
    use = None if settings is None else consumption(train.stream.path, settings)
    if plot is not None:
        inspect.plot_lengths(train.lengths, str(train.stream.path), plot)
    console = Console()
    for data in splits:
        console.print(inspect.facts_table(data))
        if sources := data.sources():
            console.print(inspect.sources_table(sources))
        print(*inspect.histogram_lines(data.lengths), sep="\n")
    print(*inspect.sample_lines(sample), sep="\n")
    if use is not None:
        console.print(consumption_table(use, str(config)))
        if use.epochs > 1:
            print(
                "[warn] the data are shorter than the run: it reads "
                f"{use.config.total_tokens:,} tokens, they hold {train.tokens:,}"
            )
    if plot is not None:
        print(f"picture: {plot}")
