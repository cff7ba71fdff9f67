"""`mamba3-lite prepare`: text of every kind to memory-mapped token shards.

`out/train` (and `out/val` when `val_fraction` > 0) are folders of shards; `out/prepare.json` holds
the settings and the counts, and is written last. Until then the work is in `out/.work`: parts that
are finished stay finished, whatever ends the run, and the same command goes on from them.
"""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console

from mamba3_lite.data import ingest
from mamba3_lite.data.config import PrepareJob, check_job, files_job, load_job, settings_of
from mamba3_lite.data.encode import EncoderPool, usable_cores
from mamba3_lite.data.files import (
    clear_folder,
    is_full_disk,
    locked_folder,
    new_folders,
    sync_folder,
    write_json,
)
from mamba3_lite.data.pack import Packer
from mamba3_lite.data.parts import DATABASE, State
from mamba3_lite.data.progress import stage_bar
from mamba3_lite.data.records import InvalidUtf8, Source
from mamba3_lite.data.report import PrepareReport, report_from, summary
from mamba3_lite.data.shards import (
    DEFAULT_SHARD_SIZE_TOKENS,
    DOCUMENTS,
    MANIFEST,
    SOURCES,
    open_shards,
)
from mamba3_lite.data.sources import open_source
from mamba3_lite.data.tokenizer import Tokenizer, load_tokenizer
from mamba3_lite.data.verify import verify as verify_folders
from mamba3_lite.errors import UserError

REPORT = "prepare.json"
WORK = ".work"
STAGES = ("read", "pack", "verify")

Stage = Literal["read", "pack", "verify"]
Log = Callable[[str], None]

# Raised when the same settings would give other bytes, so that old output is not taken for new.
_OUTPUT_VERSION = 2
_SETTINGS, _PACKED, _CLEARED = "settings", "packed", "cleared"


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    text_field: str = "text",
    val_fraction: float = 0.0,
    shard_size_tokens: int = DEFAULT_SHARD_SIZE_TOKENS,
    max_tokens: int | None = None,
    invalid_utf8: InvalidUtf8 = "replace",
    suffixes: Sequence[str] | None = None,
    workers: int = 0,
    force: bool = False,
    log: Log = print,
    progress: bool = True,
) -> PrepareReport:
    """Write the documents of `inputs` (files and folders) as shards under `out/train`, `out/val`.

    Every document is taken as it is, in the order of reading, and followed by one EOS; cleaning,
    duplicates and mixtures are for `prepare_job`. A document goes to validation by the hash of its
    ids, so the split is stable and equal texts stay together. `max_tokens` bounds train and
    validation together: the document that reaches it is cut so that its EOS still fits. Blank
    documents and bad records are skipped and counted. `invalid_utf8` says what happens to invalid
    UTF-8, lone surrogates ("replace" by U+FFFD, "skip", "fail") and broken JSON lines (skipped,
    or "fail"). A finished `out` with the same settings and unchanged inputs is returned as it is;
    any other is refused, unless `force`. `UserError` leaves nothing behind but finished parts.
    """
    job = files_job(inputs, out, text_field=text_field, suffixes=suffixes)
    settings = replace(
        job.prepare,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        shard_size_tokens=shard_size_tokens,
        max_tokens=max_tokens or 0,
        invalid_utf8=invalid_utf8,
        workers=workers,
    )
    job = replace(job, prepare=settings)
    report = prepare_job(job, force=force, log=log, progress=progress)
    assert report is not None
    return report


def prepare_job(
    job: PrepareJob,
    *,
    only: Stage | None = None,
    force: bool = False,
    keep_work: bool = False,
    check: bool = False,
    log: Log = print,
    progress: bool = True,
) -> PrepareReport | None:
    """Run the stages of `job`: read, pack, and with `check` verify.

    Killed at any moment and run again, the output has the same bytes as an uninterrupted run's.

    Args:
        only: run this stage alone.
        force: start over, and replace what an earlier `prepare` wrote once the new is complete.
        keep_work: keep `out/.work` when everything is done.

    Returns:
        The report; None when only "read" or "verify" ran.

    Raises:
        UserError: a wrong setting or input, a full disk, an `out` that holds something else.
    """
    check_job(job)
    if only is not None and only not in STAGES:
        raise UserError(f"--only: unknown stage {only!r} (stages: {', '.join(STAGES)})")
    if only == "pack" and force:
        raise UserError("--force starts over and leaves nothing to pack; drop it or --only pack")
    if only == "verify":
        _verify(job, log, progress)
        return None
    invalid_utf8 = cast(InvalidUtf8, job.prepare.invalid_utf8)
    sources = [open_source(config, invalid_utf8=invalid_utf8) for config in job.sources]
    tokenizer = load_tokenizer(job.prepare.tokenizer)
    run = _Run(job, sources, tokenizer, log, progress)
    report = run.finished(force)
    if report is None:
        report = run.stages(only, force, keep_work)
    elif not keep_work:
        # Killed between the last rename and the end.
        shutil.rmtree(run.work, ignore_errors=True)
    if check and report is not None:
        _verify(job, log, progress)
    return report


class _Run:
    """One call of `prepare_job`."""

    def __init__(
        self,
        job: PrepareJob,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        log: Log,
        progress: bool,
    ) -> None:
        self.job = job
        self.sources = sources
        self.tokenizer = tokenizer
        self.log = log
        self.progress = progress
        self.out = Path(job.prepare.out)
        self.work = self.out / WORK
        identities = {source.config.name: source.fingerprint() for source in sources}
        self.settings = settings_of(job, lambda config: identities[config.name]) | {
            "output_version": _OUTPUT_VERSION,
            "tokenizer": [tokenizer.name, tokenizer.fingerprint],
            "part_size": [ingest.PART_BYTES, ingest.PART_RECORDS],
        }

    def finished(self, force: bool) -> PrepareReport | None:
        """The report of an earlier, equal run; None when there is work to do."""
        if (self.work / DATABASE).is_file() and (force or not self._is_in_place()):
            return None
        try:
            if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
                return None
            stored = json.loads((self.out / REPORT).read_text(encoding="utf-8"))
            report = report_from(stored["report"])
            changed = _changed(stored["settings"], self.settings)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            # --force must never delete a folder that prepare did not write.
            raise UserError(
                f"{self.out}: is not empty and no readable output of prepare; choose another folder"
            ) from exc
        if force:
            return None
        if changed:
            raise UserError(
                f"{self.out}: already holds data prepared otherwise (differs in: "
                f"{', '.join(changed)}); choose another folder, or replace it with --force"
            )
        self._locate(report)
        try:
            for path in filter(None, (report.train_path, report.val_path)):
                open_shards(path)
        except UserError as exc:
            raise UserError(f"{exc} (replace {self.out} with --force)") from exc
        report.already_prepared = True
        self.log(
            f"[prepare] {self.out}: already prepared with these settings ({report.tokens:,} tokens)"
        )
        return report

    def _is_in_place(self) -> bool:
        """Whether `out` holds what the work folder came to.

        If it does not, the work goes on, also beside old output with equal settings: that is what
        `force` began.
        """
        if not (self.out / REPORT).exists():
            return False
        with contextlib.closing(State(self.work)) as state:
            return bool(state.fact(_CLEARED))

    def stages(self, only: Stage | None, force: bool, keep_work: bool) -> PrepareReport | None:
        """Read and pack, or one of them."""
        try:
            with self._state(force) as state:
                if not state.fact(_PACKED):
                    self._read(state, only)
                    if only == "read":
                        return None
                    self._pack(state)
                report = self._put_in_place(state)
        except (OSError, sqlite3.Error, UserError) as exc:
            if not is_full_disk(exc):
                raise
            raise UserError(
                f"{self.out}: no space left on the disk; free some and run the same command "
                "again, it goes on from the last finished part"
            ) from exc
        if not keep_work:
            shutil.rmtree(self.work)
        return report

    @contextlib.contextmanager
    def _state(self, force: bool) -> Iterator[State]:
        """The state in the work folder, which goes again when it comes to nothing."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(new_folders(self.work))
                stack.enter_context(locked_folder(self.work))
            except OSError as exc:
                raise UserError(
                    f"{self.out}: cannot write there ({exc.strerror}); choose another folder"
                ) from exc
            if force:
                clear_folder(self.work)
            state = State(self.work)
            try:
                self._accept(state)
                yield state
            except BaseException:
                if state.has_documents():
                    self.log(f"[prepare] finished parts are kept in {self.work}")
                else:
                    shutil.rmtree(self.work)
                raise
            finally:
                state.close()

    def _accept(self, state: State) -> None:
        """Go on only from parts that the same settings made."""
        stored = state.fact(_SETTINGS)
        if stored is not None:
            unread = {
                f"source {config.name}"
                for config in self.job.sources
                if not state.has_parts(config.name)
            }
            changed = [name for name in _changed(stored, self.settings) if name not in unread]
            if changed:
                raise UserError(
                    f"{self.work}: holds a half-done run with other settings (differs in: "
                    f"{', '.join(changed)}); set them back, or start over with --force"
                )
        state.set_fact(_SETTINGS, self.settings)

    def _read(self, state: State, only: Stage | None) -> None:
        state.delete_uncommitted([config.name for config in self.job.sources])
        reading = ingest.Ingest(self.job, self.sources, self.tokenizer, state, self.log)
        if only == "pack":
            if reading.next_source() is not None:
                raise UserError(f"{self.work}: not all is read yet; run without --only pack")
            return
        finished = sum(len(state.parts(config.name)) for config in self.job.sources)
        sizes = [source.total_bytes() for source in self.sources]
        total = None if None in sizes else sum(cast(list[int], sizes))
        size = "of unknown size" if total is None else f"{total / 1e6:,.1f} MB"
        going_on = f", going on after {finished:,} finished parts" if finished else ""
        self.log(f"[prepare] {len(sizes):,} sources, {size} -> {self.out}{going_on}")
        workers = self.job.prepare.workers or usable_cores()
        with (
            EncoderPool[ingest.Batch](self.tokenizer, workers=workers) as pool,
            stage_bar("read", total, wanted=self.progress) as bar,
        ):
            reading.run(pool, bar)

    def _pack(self, state: State) -> None:
        folder = self.work / _PACKED
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        packer = Packer(self.job, state, self.tokenizer)
        sources, shards = packer.run(folder, progress=self.progress)
        # Relative paths: the folder may be moved, and equal runs give equal bytes.
        val = "val" if self.job.val_path else None
        report = PrepareReport("." if self.job.flat else "train", val, shards, sources)
        write_json(folder / REPORT, {"settings": self.settings, "report": report.stored()})
        sync_folder(folder)
        state.set_fact(_PACKED, True)

    def _put_in_place(self, state: State) -> PrepareReport:
        """Move what is packed to where it belongs; begun again after a kill, it goes on."""
        if not state.fact(_CLEARED):
            self._remove_old_output()
            state.set_fact(_CLEARED, True)
        packed = self.work / _PACKED
        moves = [(packed / "val", self.out / "val")]
        if self.job.flat:
            # The manifest comes last: a folder with a manifest is complete.
            files = sorted((packed / "train").glob("*"), key=lambda path: path.name == MANIFEST)
            moves += [(path, self.out / path.name) for path in files]
        else:
            moves.append((packed / "train", self.out / "train"))
        for source, target in [*moves, (packed / REPORT, self.out / REPORT)]:
            if source.exists():
                source.rename(target)
        sync_folder(self.out)
        stored = json.loads((self.out / REPORT).read_text(encoding="utf-8"))
        report = report_from(stored["report"])
        self._locate(report)
        return report

    def _remove_old_output(self) -> None:
        """Delete what an earlier `prepare` wrote, its report first, so half of it is not whole."""
        (self.out / REPORT).unlink(missing_ok=True)
        for path in (self.out / "train", self.out / "val"):
            if path.exists():
                shutil.rmtree(path)
        for name in (MANIFEST, DOCUMENTS, SOURCES):
            (self.out / name).unlink(missing_ok=True)
        for path in self.out.glob("tokens_*.bin"):
            path.unlink()

    def _locate(self, report: PrepareReport) -> None:
        report.train_path = str(self.job.train_path)
        report.val_path = str(self.job.val_path) if self.job.val_path else None


def _changed(stored: dict[str, Any], present: dict[str, Any]) -> list[str]:
    # As JSON keeps them: a tuple comes back as a list.
    present = json.loads(json.dumps(present))
    return [name for name in present if stored.get(name) != present[name]]


def _verify(job: PrepareJob, log: Log, progress: bool) -> None:
    tokens = verify_folders(job.train_path, job.val_path, progress=progress)
    log(f"[prepare] {job.prepare.out}: verified, {tokens:,} tokens")


_Inputs = Annotated[
    list[str],
    typer.Argument(
        help="One data or training configuration (.yaml); or text, JSON-lines and Parquet files, "
        "and folders of them (read in sorted order)."
    ),
]
_Out = Annotated[
    str | None, typer.Option("--out", "-o", help="Folder to make: train/, val/, prepare.json.")
]
_Tokenizer = Annotated[
    str | None, typer.Option(help="'gpt2' (built in), or the path of a tokenizer.json.")
]
_TextField = Annotated[
    str | None, typer.Option(help="Field of a record that holds the text (files only).")
]
_Suffix = Annotated[
    list[str] | None,
    typer.Option(help="Read files with this ending instead; repeatable (files only)."),
]
_ValFraction = Annotated[
    float | None, typer.Option(help="Share of the documents that goes to OUT/val.")
]
_ShardSize = Annotated[int | None, typer.Option(help="Tokens per shard file.")]
_MaxTokens = Annotated[
    int | None, typer.Option(help="Stop at this many tokens, train and val together; 0: all.")
]
_Seed = Annotated[int | None, typer.Option(help="Chooses the documents of the validation split.")]
_InvalidUtf8 = Annotated[
    str | None, typer.Option(help="Invalid UTF-8 and broken JSON lines: replace, skip or fail.")
]
_Workers = Annotated[
    int | None, typer.Option(help="Tokenising processes; 0: one for each CPU core.")
]
_SkipClean = Annotated[
    bool, typer.Option("--skip-clean", help="Drop no document for its text (configuration only).")
]
_SkipDedup = Annotated[
    bool, typer.Option("--skip-dedup", help="Keep duplicate documents (configuration only).")
]
_Only = Annotated[str | None, typer.Option(help="Run one stage alone: read, pack or verify.")]
_Verify = Annotated[
    bool, typer.Option("--verify", help="Read everything again at the end and check it.")
]
_KeepWork = Annotated[bool, typer.Option("--keep-work", help="Keep OUT/.work when all is done.")]
_Force = Annotated[
    bool, typer.Option("--force", help="Start over; replace what prepare wrote to OUT before.")
]


def prepare_command(
    inputs: _Inputs,
    out: _Out = None,
    tokenizer: _Tokenizer = None,
    text_field: _TextField = None,
    suffix: _Suffix = None,
    val_fraction: _ValFraction = None,
    shard_size_tokens: _ShardSize = None,
    max_tokens: _MaxTokens = None,
    seed: _Seed = None,
    invalid_utf8: _InvalidUtf8 = None,
    workers: _Workers = None,
    skip_clean: _SkipClean = False,
    skip_dedup: _SkipDedup = False,
    only: _Only = None,
    verify: _Verify = False,
    keep_work: _KeepWork = False,
    force: _Force = False,
) -> None:
    """Turn text into token shards for pretraining.

    A configuration names sources: they are read, cleaned, freed of duplicates, tokenised, and mixed
    by weight. Files alone are taken as they are. Stopped or killed, the same command goes on from
    the last finished part.

    Examples:

    mamba3-lite prepare notes/ corpus.jsonl --out data/mine --val-fraction 0.01

    mamba3-lite prepare configs/data/mamba2-default.yaml --out data/mix --max-tokens 1000000
    """
    if len(inputs) == 1 and inputs[0].endswith((".yaml", ".yml")) and not suffix:
        job = _configured(inputs[0], text_field, skip_clean, skip_dedup)
    else:
        job = files_job(inputs, out or "", text_field=text_field or "text", suffixes=suffix or None)
    given: dict[str, Any] = {
        "out": out,
        "tokenizer": tokenizer,
        "val_fraction": val_fraction,
        "shard_size_tokens": shard_size_tokens,
        "max_tokens": max_tokens,
        "seed": seed,
        "invalid_utf8": invalid_utf8,
        "workers": workers,
    }
    given = {name: value for name, value in given.items() if value is not None}
    job = replace(job, prepare=replace(job.prepare, **given), flat=job.flat and out is None)
    report = prepare_job(
        job,
        # typer before 0.19 knows no Literal; prepare_job checks the value.
        only=cast(Stage | None, only),
        force=force,
        keep_work=keep_work,
        check=verify,
    )
    if report is not None:
        Console().print(summary(report))


def _configured(
    path: str, text_field: str | None, skip_clean: bool, skip_dedup: bool
) -> PrepareJob:
    if text_field is not None:
        raise UserError(f"--text-field is for files; set field of each source in {path}")
    job = load_job(path)
    if skip_clean:
        job = replace(job, clean=replace(job.clean, enabled=False))
    if skip_dedup:
        job = replace(job, dedup=replace(job.dedup, exact=False, near=False))
    return job
