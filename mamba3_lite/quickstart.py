"""From nothing to a trained model in minutes.

Python's own standard library is the corpus; the code path is production's, on a small model.
"""

import dataclasses
import json
import math
import os
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.data.prepare import prepare
from mamba3_lite.data.tokenizer import load_tokenizer
from mamba3_lite.distributed.world import World
from mamba3_lite.errors import UserError
from mamba3_lite.inference.generate import generate, load_model
from mamba3_lite.schema import COMMAND_LINE, find_config
from mamba3_lite.training.config import load_training_config, yaml_key
from mamba3_lite.training.pretrain import EXIT_DONE, Pretrainer
from mamba3_lite.training.validation import evaluate
from mamba3_lite.utils.logging import read_metrics

CONFIG = "configs/quickstart.yaml"
VAL_FRACTION = 0.015
PROMPT = "def"
# Test suites and bundled wheels are not the library.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def documents() -> Iterator[tuple[str, str]]:
    """(name, text), in a fixed order.

    The source files of the Python that runs this, and the reference texts of ``help()``.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        # pydoc_data holds the reference texts as one big Python literal; they come as text below.
        if not _NOT_LIBRARY & set(inside.parts) and inside.parts[0] != "pydoc_data":
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield inside.as_posix(), text
    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield f"help({name!r})", text


def write_corpus(path: Path) -> int:
    """One JSON line a document, complete or not there at all; returns the bytes of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    size = 0
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for name, text in documents():
                file.write(json.dumps({"text": text, "source": name}) + "\n")
                size += len(text.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def unigram_entropy(dataset: PretrainDataset) -> float:
    """Entropy in nat of the token frequencies among the targets of all windows.

    It is what the best context-free model could reach.
    """
    counts = np.zeros(dataset.vocab_size, dtype=np.int64)
    for index in range(len(dataset)):
        targets = dataset[index][1].numpy()
        counts += np.bincount(targets[targets >= 0], minlength=dataset.vocab_size)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def plot_losses(run_dir: Path, unigram: float) -> Path | None:
    """``loss.png`` in the run folder; None when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_metrics(run_dir / "metrics.jsonl")
    train = [(r["opt_step"], r["loss"]) for r in rows if r["kind"] == "train"]
    val = [(r["opt_step"], r["val_loss"]) for r in rows if r["kind"] == "val"]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(*zip(*train, strict=True), color="#4878a8", lw=1, label="training (window mean)")
    axes.plot(*zip(*val, strict=True), color="#c44e52", marker="o", label="validation")
    entropy = "unigram entropy of the validation split"
    axes.axhline(unigram, color="#777777", ls="--", lw=1, label=entropy)
    axes.set(
        xlabel="optimizer step", ylabel="loss (nat per token)", title="Mamba-3-Lite quickstart"
    )
    axes.grid(alpha=0.25)
    axes.legend()
    target = run_dir / "loss.png"
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


def _report(trainer: Pretrainer, run_dir: Path) -> dict[str, float]:
    """Measures what was trained.

    Validation loss, the same without context, and the unigram entropy, all over the same targets.
    """
    dataset = trainer.val_dataset
    assert dataset is not None
    model = load_model(run_dir)

    def loss(reset: bool) -> float:
        return evaluate(
            model,
            dataset,
            batch_size=trainer.config.batch_size,
            world=World(torch.device("cpu")),
            amp_context=torch.autocast("cpu", enabled=False),
            reset_every_token=reset,
        )[0]

    result = {
        "val_loss": loss(False),
        "val_loss_without_context": loss(True),
        "unigram_entropy": unigram_entropy(dataset),
    }
    (run_dir / "quickstart.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _print_sample(run_dir: Path, eos_id: int) -> None:
    text = load_tokenizer("gpt2")
    ids: list[int] = []

    def keep(token: Tensor) -> None:
        ids.append(int(token[0]))

    generate(
        load_model(run_dir), [text.encode(PROMPT)], max_new_tokens=120, temperature=0.8, top_k=50,
        seed=1, eos_id=eos_id, on_tokens=keep,
    )  # fmt: skip
    print(f"\n--- a sample, one recurrent step a token ---\n{PROMPT}{text.decode(ids)}\n---")


def quickstart_command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, such as training.total_steps=50.")
    ] = None,
    run_dir: Annotated[
        str, typer.Option(help="Where data and checkpoints go.")
    ] = "runs/quickstart",
) -> None:
    """Train a small Mamba-3-Lite on the standard library of this Python.

    Data, training, validation, picture and sample in one go. Nothing is downloaded. Interrupted and
    started again, it goes on where it was.

    Examples:

    mamba3-lite quickstart

    mamba3-lite quickstart --run-dir /tmp/q training.total_steps=100
    """
    run, data = Path(run_dir), Path(run_dir) / "data"
    # Before the corpus is written: a mistyped override must leave nothing behind.
    config, sources = load_training_config(find_config(CONFIG), list(overrides or []))
    places: dict[str, Any] = {
        "data_path": str(data / "tokens" / "train"),
        "val_data_path": str(data / "tokens" / "val"),
        "checkpoint_dir": str(run),
    }
    config = dataclasses.replace(config, **places)
    sources |= {yaml_key(name): COMMAND_LINE for name in places}
    corpus = data / "corpus.jsonl"
    if not corpus.is_file():
        try:
            size = write_corpus(corpus)
        except OSError as problem:
            raise UserError(
                f"{run}: cannot write there ({problem.strerror}); choose another --run-dir."
            ) from problem
        print(f"corpus: {size / 1e6:.1f} MB of text from Python's standard library -> {corpus}")
    prepare([corpus], data / "tokens", val_fraction=VAL_FRACTION)
    trainer = Pretrainer(config, sources=sources)
    code = trainer.train()
    if code != EXIT_DONE:
        print(f"stopped; run the same command again to go on from {run}")
        raise typer.Exit(code)

    result = _report(trainer, run)
    picture = plot_losses(run, result["unigram_entropy"])
    _print_sample(run, load_tokenizer("gpt2").eos_id)
    loss, unigram = result["val_loss"], result["unigram_entropy"]
    reset = result["val_loss_without_context"]
    print(f"validation loss        {loss:.3f} nat (perplexity {math.exp(loss):.0f})")
    print(f"unigram entropy        {unigram:.3f} nat: the model is {unigram - loss:.2f} below it")
    print(f"state reset each token {reset:.3f} nat: the state is worth {reset - loss:.2f}")
    print(f"picture                {picture or 'none: pip install mamba3-lite[plots]'}")
    print(
        f'next: mamba3-lite generate {run} --prompt "class"\n'
        f"      mamba3-lite quickstart --run-dir {run} training.total_steps=2000  (goes on)\n"
        "      mamba3-lite prepare YOUR_TEXT --out data/mine --val-fraction 0.01, "
        "then a YAML like configs/quickstart.yaml"
    )
