"""The command ``eval``: perplexity, tasks and multiple choice of a trained model."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from mamba3_lite import hardware
from mamba3_lite.errors import UserError
from mamba3_lite.evaluation import choices as multiple_choice
from mamba3_lite.evaluation import harness, record
from mamba3_lite.evaluation.corpus import shard_corpus, text_corpus
from mamba3_lite.evaluation.perplexity import Mode, save_picture, windowed
from mamba3_lite.evaluation.perplexity import measure as measure_perplexity
from mamba3_lite.evaluation.subject import Subject, load_subject


def evaluate(
    run_dir: str,
    *,
    perplexity: Mapping[str, Any] | None,
    tasks: Sequence[str],
    choices: Sequence[str],
    limit: int | None,
    out: str | None,
    task_options: Mapping[str, Any],
    load_options: Mapping[str, Any],
) -> None:
    """Measures what is asked for, and writes a record of each.

    Args:
        perplexity: options of :func:`_perplexity`; None: not that.
        task_options: of :func:`mamba3_lite.evaluation.harness.measure`.
        load_options: of :func:`mamba3_lite.evaluation.subject.load_subject`.
    """
    if tasks:
        harness.harness_class()  # before a checkpoint takes its time
    questions = {path: multiple_choice.read_questions(path, limit=limit) for path in choices}
    subject = load_subject(run_dir, **load_options)
    folder = Path(out or Path(subject.checkpoint["folder"]) / record.FOLDER)
    record.require_writable(folder)
    if perplexity is not None:
        _perplexity(subject, folder, limit=limit, **perplexity)
    if tasks:
        settings = {**task_options, "limit": limit}
        _keep("tasks", subject, settings, harness.measure(subject, tasks, **settings), folder)
    if questions:
        found = [multiple_choice.measure(subject, some, name=p) for p, some in questions.items()]
        _keep("choices", subject, {"limit": limit}, found, folder)


def _perplexity(
    subject: Subject,
    out: Path,
    *,
    data: Sequence[str],
    text: Sequence[str],
    text_field: str,
    tokenizer: str | None,
    window: int | None,
    stride: int | None,
    documents: bool,
    limit: int | None,
) -> None:
    """Of each data path, of all texts together, or of the run's own validation data."""
    modes = _modes(window, stride, documents, subject.scorer.model.cfg.max_seq_len)
    if not data and not text:
        own = subject.training.get("val_data_path")
        if not own:
            raise UserError(
                "--perplexity: the run names no validation data; name some with --data or --text."
            )
        data = [own]
    corpora = [shard_corpus(path, subject, tokenizer=tokenizer) for path in data]
    if text:
        corpora.append(text_corpus(text, subject, field=text_field))
    results = [
        measure_perplexity(subject.scorer, corpus, mode, limit=limit)
        for corpus in corpora
        for mode in modes
    ]
    for row in results:
        print(f"{row['data']}, {row['mode']}: loss by the number of tokens read before")
        for bucket in row["by_context"]:
            reach = f"{bucket['from']:,} to {bucket['to']:,}"
            print(f"{reach:>22}  {bucket['loss']:8.4f} nat  {bucket['tokens']:>12,} tokens")
    path = _keep("perplexity", subject, {"limit": limit}, results, out)
    picture = path.with_suffix(".png")
    drawn = save_picture(results, picture)
    print(f"picture: {picture}" if drawn else 'no picture: pip install "mamba3-lite[plots]"')


def _modes(window: int | None, stride: int | None, documents: bool, trained: int) -> list[Mode]:
    """Windows as long as those of training, unless something else is asked for."""
    found = []
    if window is not None or stride is not None or not documents:
        found.append(windowed(trained if window is None else window, stride))
    return found + ([Mode()] if documents else [])


def _keep(kind: str, subject: Subject, settings: dict[str, Any], results: Any, out: Path) -> Path:
    """Writes a record, and says what it holds."""
    kept = {
        "kind": kind,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": subject.checkpoint,
        "settings": {**subject.settings, **settings},
        "results": results,
        "environment": hardware.environment_record(),
    }
    path = record.write_record(out, kept)
    for line in record.headlines(kept):
        print(line)
    print(f"result: {path}")
    return path


def eval_command(
    run_dir: Annotated[str, typer.Argument(help="Run folder, checkpoint file or exported folder.")],
    perplexity: Annotated[
        bool, typer.Option("--perplexity", help="Of --data and --text; default: the run's own.")
    ] = False,
    data: Annotated[
        list[str] | None, typer.Option(help="Token data, as prepare writes; may be repeated.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="File of text or JSON lines; may be repeated.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Of JSON lines: what holds the text.")] = "text",
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window; default: those of training.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="By how much a window moves on; default: all of it.")
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="Read each document whole, the state carried.")
    ] = False,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas between.")
    ] = None,
    include_path: Annotated[str | None, typer.Option(help="Folder of further task files.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question of a task.")
    ] = None,
    choices: Annotated[
        list[str] | None, typer.Option(help="Multiple choice, JSON lines; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many documents, examples or questions.")
    ] = None,
    opt_step: Annotated[int | None, typer.Option(help="Checkpoint; default: the newest.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="gpt2, or a tokenizer.json; default: the model's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU.")
    ] = "auto",
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a forward pass; default: 4096, 65536 on a GPU.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Texts read together; default: as many as fit.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Where results go; default: the folder 'eval' of the run.")
    ] = None,
) -> None:
    """Evaluate a trained model: perplexity, tasks of lm-evaluation-harness, multiple choice.

    Examples:

    mamba3-lite eval runs/quickstart --perplexity

    mamba3-lite eval runs/quickstart --perplexity --text notes.txt --documents

    mamba3-lite eval runs/quickstart --tasks arc_easy,hellaswag

    mamba3-lite eval runs/quickstart --choices questions.jsonl
    """
    wanted = perplexity or documents or any((data, text, window, stride))
    if not (wanted or tasks or choices):
        raise UserError("nothing to evaluate: give --perplexity, --tasks or --choices.")
    what = {
        "data": data or [], "text": text or [], "text_field": text_field, "tokenizer": tokenizer,
        "window": window, "stride": stride, "documents": documents,
    }  # fmt: skip
    how = {
        "opt_step": opt_step, "tokenizer": tokenizer, "device": device, "dtype": dtype,
        "batch_tokens": batch_tokens, "batch_size": batch_size,
    }  # fmt: skip
    evaluate(
        run_dir, perplexity=what if wanted else None, tasks=tasks.split(",") if tasks else [],
        choices=choices or [], limit=limit, out=out, load_options=how,
        task_options={"include_path": include_path, "num_fewshot": num_fewshot},
    )  # fmt: skip
