"""The command `ab`: arms that differ in one key, interleaved, measured, and a verdict in words."""

import contextlib
import json
import os
import re
import reprlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mamba3_lite
from mamba3_lite import env
from mamba3_lite.errors import UserError
from mamba3_lite.measure import ab_page, html
from mamba3_lite.measure.ab_arms import THROUGHPUT_KNOBS, Arm, Protocol, build_arms, load_arms
from mamba3_lite.measure.ab_run import EXIT_ARM_FAILED
from mamba3_lite.measure.ab_verdict import Comparison, compare, summary
from mamba3_lite.models.ssd_backends import BACKENDS
from mamba3_lite.training.command import DEFAULT_CONFIG
from mamba3_lite.utils.logging import read_metrics

RESULTS, PICTURE, PAGE = "ab.jsonl", "ab.png", "ab.html"
EXIT_ARM_OR_LOSS = 1
_ROOT = Path(mamba3_lite.__file__).resolve().parents[1]
_FIRST_MICRO_STEP = re.compile(r"^first micro-step took ([\d.]+) s$", re.MULTILINE)

# Trains an arm as the file in its run folder says; None, or why the arm cannot be trained.
Train = Callable[[Arm, Path], str | None]


class Stopped(BaseException):
    """SIGINT or SIGTERM."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number


class Results:
    """The file ab.jsonl: one experiment, a row a run, at the end the verdicts.

    Raises:
        UserError: the file holds another experiment, or one of other code, versions or machine.
    """

    def __init__(self, path: Path, experiment: Mapping[str, Any]) -> None:
        self.path, self.experiment = path, experiment
        found = read_metrics(path) if path.exists() else []
        self.runs = [row for row in found if row["kind"] == "run"]
        changes = list(_changes(found[0], json.loads(json.dumps(experiment)))) if self.runs else []
        if changes:
            raise UserError(
                f"{path} holds results of something else, which cannot be mixed with new ones "
                f"({'; '.join(changes[:6])}{'; ...' if changes[6:] else ''}): choose another --out."
            )

    def add(self, run: dict[str, Any]) -> None:
        """Keeps a finished run, whatever happens next."""
        self.runs.append(run)
        self.write([])

    def write(self, verdicts: Sequence[Mapping[str, Any]]) -> None:
        """The whole file, by rename: a kill leaves the one before."""
        rows = [self.experiment, *self.runs, *verdicts]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, self.path)


def _changes(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Each leaf in which two experiments differ; how they were called does not count."""
    if where == "command":
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            dotted = f"{where}.{name}" if where else name
            yield from _changes(old.get(name), new.get(name), dotted)
    elif old != new:
        yield f"{where}: {reprlib.repr(old)} -> {reprlib.repr(new)}"


def describe(
    key: str, arms: Sequence[Arm], protocol: Protocol, checked: Mapping[str, Any]
) -> dict[str, Any]:
    """The experiment, as ab.jsonl and the page hold it: equal for runs that may be mixed."""
    settings = {
        name: value
        for name, value in arms[0].settings.items()
        if all(arm.settings[name] == value for arm in arms)
    }
    for left_to_the_runs in ("training.seed", "training.save_dir"):
        settings.pop(left_to_the_runs, None)
    return {
        "kind": "experiment",
        "key": key,
        "protocol": asdict(protocol),
        "arms": {
            arm.name: {
                "value": arm.value,
                **effect,
                "settings": {k: v for k, v in arm.settings.items() if k not in settings},
            }
            for arm, effect in zip(arms, checked["effects"], strict=True)
        },
        "first_seed": arms[0].config.seed,
        "settings": settings,
        "data_fingerprint": checked["data_fingerprint"],
        "environment": checked["environment"],
        "command": shlex.join(["mamba3-lite", *sys.argv[1:]]),
    }


def refuse_wrong_paths(key: str, arms: Sequence[Arm], effects: Sequence[Mapping[str, Any]]) -> None:
    """`UserError` where arms would differ in the path as well, or not at all."""
    about = {"model.ssd_dispatch": "backend", "training.compile_mode": "compile"}
    for what in ("backend", "compile"):
        values = [effect[what] for effect in effects]
        each = ", ".join(f"{arm.name}: {value}" for arm, value in zip(arms, values, strict=True))
        if about.get(key) == what and len(set(values)) < len(values):
            raise UserError(f"arms of {key} would run alike here ({what} in effect: {each}).")
        if what == "backend" and about.get(key) != what and len(set(values)) > 1:
            raise UserError(
                f"arms would also differ in the SSD path ({each}); name one in model.ssd_dispatch."
            )


def warnings(
    key: str, arms: Sequence[Arm], protocol: Protocol, effects: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What the reader of the verdict should know."""
    found = []
    warm_up = max(arm.config.warmup_steps for arm in arms)
    if not protocol.throughput and protocol.loss_at <= warm_up:
        found.append(
            f"[warn] loss@{protocol.loss_at} falls inside warm-up ({warm_up} optimizer steps): it "
            "says little about the learning rate; see --loss-at and training.warmup_steps"
        )
    own_chunk = BACKENDS[effects[0]["backend"]].projected is not None
    if key == "model.chunk_size" and own_chunk:
        found.append(f"[warn] the path {effects[0]['backend']!r} does not read model.chunk_size")
    return found


def order(arms: Sequence[Arm], repeats: int) -> list[tuple[int, Arm]]:
    """A B, B A, A B, ...: a drift of the machine falls on all arms alike."""
    return [
        (repeat, arm)
        for repeat in range(repeats)
        for arm in (arms if repeat % 2 == 0 else reversed(arms))
    ]


def child_environment(arm: Arm, out: Path) -> dict[str, str]:
    """Of a run: no W&B, no overriding variable, its own launch knobs and compile cache."""
    variables = env.for_child(str(_ROOT))
    for name in ("WANDB_PROJECT", "TORCH_COMPILE_MODE"):
        variables.pop(name, None)
    # Shared by the repeats of an arm, so that the first one shows what compiling costs.
    cache = str((out / arm.name / "compile_cache").resolve())
    return {**variables, **arm.variables, "TORCHINDUCTOR_CACHE_DIR": cache}


def run_child(arguments: Sequence[str], variables: dict[str, str], log: Path) -> int:
    """Runs `ab_run`, what it says in ``log``; its exit code. Whatever ends us ends it."""
    with (
        log.open("w", encoding="utf-8") as said,
        subprocess.Popen(
            [sys.executable, "-m", "mamba3_lite.measure.ab_run", *arguments],
            stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, env=variables,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            return process.wait()
        except BaseException:
            # With the processes that it has started for loading and compiling.
            os.killpg(process.pid, signal.SIGKILL)
            raise


def failure(what: str, log: Path) -> UserError:
    """A child's own error line where it has one."""
    said = log.read_text(encoding="utf-8").splitlines() or ["it said nothing"]
    for line in reversed(said):
        if line.startswith("error: "):
            return UserError(f"{what}: {line.removeprefix('error: ')}")
    return UserError(f"{what} failed ({said[-1]}); all that it said is in {log}")


def check_arms(arms: Sequence[Arm], out: Path) -> dict[str, Any]:
    """Everything that can be refused, before any training, each arm in a process of its own."""
    found = []
    for arm in arms:
        folder = out / arm.name
        folder.mkdir(parents=True, exist_ok=True)
        arm.write_yaml(folder / "arm.yaml", seed=arm.config.seed)
        log = folder / "check.log"
        if run_child(["check", str(folder / "arm.yaml")], child_environment(arm, out), log):
            raise failure(f"arm {arm.name}", log)
        found.append(json.loads(log.read_text(encoding="utf-8").splitlines()[-1]))
    return {**found[0], "effects": [one["effect"] for one in found]}


def trainer(out: Path, experiment: Mapping[str, Any]) -> Train:
    """Trains in a process of its own, so that memory and compilations do not mix."""

    def train(arm: Arm, folder: Path) -> str | None:
        log = folder / "output.log"
        arguments = ["train", str(folder / "arm.yaml"), experiment["arms"][arm.name]["backend"]]
        code = run_child(arguments, child_environment(arm, out), log)
        if code == EXIT_ARM_FAILED:
            return log.read_text(encoding="utf-8").splitlines()[-1]
        if code:
            raise failure(f"{folder}", log)
        return None

    return train


def measure(
    arms: Sequence[Arm], protocol: Protocol, repeats: int, results: Results, train: Train
) -> Iterator[dict[str, Any]]:
    """Every run that is not among the results yet; yields each as it is kept.

    An arm that failed is not tried again.
    """
    for repeat, arm in order(arms, repeats):
        mine = [run for run in results.runs if run["arm"] == arm.name]
        if any(run["failed"] or run["repeat"] == repeat for run in mine):
            continue
        folder, seed = results.path.parent / arm.name / str(repeat), arm.config.seed + repeat
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        folder.mkdir(parents=True)
        arm.write_yaml(folder / "arm.yaml", seed=seed)
        start = time.perf_counter()
        failed = train(arm, folder)
        run: dict[str, Any] = {
            "kind": "run", "arm": arm.name, "value": arm.value, "repeat": repeat, "seed": seed,
            "wall_sec": round(time.perf_counter() - start, 1), "failed": failed,
        }  # fmt: skip
        if failed is None:
            run |= summary(read_metrics(folder / "metrics.jsonl"), protocol)
            first = _FIRST_MICRO_STEP.search((folder / "train.log").read_text(encoding="utf-8"))
            run["first_micro_step_sec"] = float(first[1]) if first else None
        results.add(run)
        yield run


def conclude(
    experiment: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], protocol: Protocol
) -> tuple[list[Comparison], list[str]]:
    """Every arm against the first, and all that there is to say, one sentence an arm."""
    key, finished = experiment["key"], ab_page.by_arm(experiment, runs)
    failed = {run["arm"]: run["failed"] for run in runs if run["failed"]}
    sentences = [f"{name} FAILED: {reason}" for name, reason in failed.items()]
    comparisons = []
    first, *others = finished
    for name in others:
        repeats = [{run["repeat"] for run in finished[one]} for one in (first, name)]
        if repeats[0] & repeats[1] and not failed.keys() & {first, name}:
            one = compare(
                finished[first], finished[name], protocol, arms=len(finished), key=key,
                pure=not key or key in THROUGHPUT_KNOBS,
            )  # fmt: skip
            comparisons.append(one)
            sentences.append(one.words)
    return comparisons, sentences


def line_of(run: Mapping[str, Any], key: str, repeats: int) -> str:
    """One finished run."""
    what = f"{key}={run['value']}" if key else run["value"]
    start = f"{run['arm']} ({what}) repeat {run['repeat'] + 1}/{repeats}:"
    if run["failed"]:
        return f"{start} FAILED: {run['failed']}"
    return (
        f"{start} {run['tps']:,.0f} tok/s, loss {run['loss']:.4f}, {run['peak_mem_gib']:.2f} GiB "
        f"in {run['wall_sec']:,.0f} s"
    )


@contextlib.contextmanager
def stoppable(console: Console) -> Iterator[None]:
    """SIGINT and SIGTERM end the block by an exception, one line, and their exit code."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Stopped as stopped:
        say(console, "stopped: finished runs are kept, and the same command goes on")
        raise typer.Exit(stopped.code) from None
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def measure_all(
    arms: Sequence[Arm], protocol: Protocol, repeats: int, results: Results, console: Console
) -> None:
    """The runs behind a progress bar, a line for each that is finished."""
    key, total = results.experiment["key"], len(arms) * repeats
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    train = trainer(results.path.parent, results.experiment)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=len(results.runs))
        for run in measure(arms, protocol, repeats, results, train):
            say(console, line_of(run, key, repeats))
            bar.update(task, completed=len(results.runs))


def say(console: Console, text: str) -> None:
    """A line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show(results: Results, protocol: Protocol, console: Console) -> int:
    """Verdict, table, picture and page; the exit code."""
    experiment, runs, out = results.experiment, results.runs, results.path.parent
    comparisons, sentences = conclude(experiment, runs, protocol)
    results.write([one.row() for one in comparisons])
    header, rows = ab_page.table(experiment, runs, comparisons)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)
    for sentence in sentences:
        say(console, sentence)
    drawing = ab_page.Picture(experiment, runs, comparisons)
    if not html.save_picture(drawing.draw, out / PICTURE, size_inches=drawing.size_inches):
        say(console, html.NO_PICTURE)
    (out / PAGE).write_text(
        ab_page.page(experiment, runs, comparisons, sentences), encoding="utf-8"
    )
    say(console, f"page: {out / PAGE}, rows: {results.path}")
    wrong = any(run["failed"] for run in runs)
    wrong |= any(one.loss_check == "failed" for one in comparisons)
    return EXIT_ARM_OR_LOSS if wrong else 0


def default_out(key: str, protocol: Protocol) -> Path:
    """Beside others in the folder ab, named after the key."""
    name = "batch_geometry" if " x " in key else key or "identical"
    return Path("ab") / (f"{name}-throughput" if protocol.throughput else name)


def ab_command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=v1,v2 is swept; section.key=value is set in all arms."),
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="YAML configuration; several: one an arm.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; ab/KEY.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each arm, interleaved.")] = 4,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Only some timed micro-steps at full shape.")
    ] = False,
    micro_steps: Annotated[
        int, typer.Option(min=1, help="Timed micro-steps, with --throughput.")
    ] = 60,
    opt_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a run.")] = 3000,
    drop: Annotated[int, typer.Option(min=0, help="Optimizer steps whose speed is dropped.")] = 500,
    loss_at: Annotated[int, typer.Option(help="Optimizer step whose loss is compared.")] = 2000,
    last: Annotated[int, typer.Option(min=2, help="Log rows that speed and loss are of.")] = 20,
    row_opt_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a log row.")] = 25,
    aa: Annotated[
        bool, typer.Option("--aa", help="Compare a configuration with itself: what is noise?")
    ] = False,
) -> None:
    """Compare configurations that differ in one key: speed, loss, memory, and a verdict.

    Examples:

    mamba3-lite ab --config run.yaml model.chunk_size=64,128 --throughput

    mamba3-lite ab --config run.yaml training.lr=1.5e-4,3e-4,6e-4 --repeats 3

    mamba3-lite ab --config a.yaml --config b.yaml --out ab/mine

    A stopped comparison goes on with the same command. Exit codes: 0 done, 1 an arm failed or a
    loss check did, 2 user error, 130 SIGINT, 143 SIGTERM.
    """
    loaded = load_arms(
        config or [DEFAULT_CONFIG], overrides or [], identical=aa,
        opt_steps=None if throughput else opt_steps,
    )  # fmt: skip
    if throughput:
        least = min(one.gradient_accumulation_steps for one, _ in loaded)
        protocol = Protocol.timed(micro_steps, least)
    else:
        protocol = Protocol(False, opt_steps, drop, loss_at, last, row_opt_steps)
    key, arms = build_arms(loaded, protocol, identical=aa)
    folder = out or default_out(key, protocol)
    console = Console()
    with stoppable(console):
        folder.mkdir(parents=True, exist_ok=True)
        checked = check_arms(arms, folder)
        refuse_wrong_paths(key, arms, checked["effects"])
        results = Results(folder / RESULTS, describe(key, arms, protocol, checked))
        for line in warnings(key, arms, protocol, checked["effects"]):
            say(console, line)
        measure_all(arms, protocol, repeats, results, console)
        raise typer.Exit(show(results, protocol, console))
