"""The settings of `prepare`: a data configuration, or a training configuration that names a mix."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from mamba3_lite.data.clean import CleanConfig
from mamba3_lite.data.mixture import OnExhausted
from mamba3_lite.data.records import InvalidUtf8, SourceConfig
from mamba3_lite.data.shards import DEFAULT_SHARD_SIZE_TOKENS
from mamba3_lite.errors import UserError
from mamba3_lite.schema import find_config, named, nearest, read_layers, typed

# A name becomes a folder of the work folder.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class PrepareConfig:
    """The section `prepare:`.

    `max_tokens` bounds training and validation together, 0 takes all. `seed` chooses the documents
    of the validation split. `on_exhausted` is what happens when a source has fewer tokens than its
    weight asks for: "stop" there, "continue" with the others, or "repeat" it. `workers` is the
    number of tokenising processes, 0: one for each CPU core; it never changes the output.
    """

    out: str = ""
    tokenizer: str = "gpt2"
    seed: int = 0
    max_tokens: int = 0
    shard_size_tokens: int = DEFAULT_SHARD_SIZE_TOKENS
    val_fraction: float = 0.0
    on_exhausted: str = "stop"
    workers: int = 0
    invalid_utf8: str = "replace"


@dataclass(frozen=True)
class DedupConfig:
    """The section `dedup:`. Near-duplicates are those above `near_threshold` (Jaccard)."""

    exact: bool = True
    near: bool = False
    near_threshold: float = 0.8


@dataclass(frozen=True)
class PrepareJob:
    """All settings of one `prepare`.

    `flat`: the training shards lie in `prepare.out` itself; otherwise in `out/train`. Validation
    is always `out/val`.
    """

    prepare: PrepareConfig
    sources: tuple[SourceConfig, ...]
    clean: CleanConfig = dataclasses.field(default_factory=CleanConfig)
    dedup: DedupConfig = dataclasses.field(default_factory=DedupConfig)
    flat: bool = False

    @property
    def train_path(self) -> Path:
        """Where the training shards go: what `data.train_data_path` of a training run names."""
        out = Path(self.prepare.out)
        return out if self.flat else out / "train"

    @property
    def val_path(self) -> Path | None:
        """Where the validation shards go; None without a validation split."""
        return Path(self.prepare.out) / "val" if self.prepare.val_fraction > 0 else None


_SECTIONS: Mapping[str, type] = {
    "prepare": PrepareConfig,
    "clean": CleanConfig,
    "dedup": DedupConfig,
}
_LIST = "sources"
# What a training configuration decides about its data, beside train_data_path and data_mix.
_FROM_TRAINING = ("tokenizer", "max_tokens", "shard_size_tokens")


def files_job(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    text_field: str = "text",
    suffixes: Sequence[str] | None = None,
) -> PrepareJob:
    """Files and folders as one source, every document taken as it is; `UserError` for none."""
    if not inputs:
        raise UserError("no input: name at least one file or folder")
    if suffixes is not None and not suffixes:
        raise UserError("suffixes: name at least one file ending, such as .txt")
    source = SourceConfig(
        name="files",
        paths=tuple(map(str, inputs)),
        field=text_field,
        suffixes=tuple(suffixes or ()),
    )
    return PrepareJob(
        prepare=PrepareConfig(out=str(out)),
        sources=(source,),
        clean=CleanConfig(enabled=False),
        dedup=DedupConfig(exact=False),
    )


def load_job(path: str | Path) -> PrepareJob:
    """Read and check a data configuration, or a training configuration with `data.data_mix`.

    `UserError` with every problem found in one message. Values that the command line may still
    give, such as `prepare.out`, are checked by `check_job`.
    """
    path = find_config(path)
    layers = read_layers(path, [])
    names = {section for content, _ in layers for section in content}
    if not names & {"model", "training", "data"}:
        return _job_of(layers)
    data: dict[str, Any] = {}
    for content, _ in layers:
        data |= content.get("data") or {}
    return _job_of_training(path, data)


def _job_of_training(path: Path, data: Mapping[str, Any]) -> PrepareJob:
    mix = data.get("data_mix")
    if not mix or not isinstance(mix, str):
        raise UserError(
            f"{path}: a training configuration without data.data_mix; name a file of configs/data "
            "there, or give prepare a data configuration"
        )
    problems: list[str] = []
    where = f" in {path}"
    given = {name: data[name] for name in (*_FROM_TRAINING,) if name in data}
    values = _typed_section(PrepareConfig, given, "data", where, problems)
    target = data.get("train_data_path")
    if not isinstance(target, str) or not target:
        problems.append(f"'data.train_data_path'{where} must be the folder to prepare")
    if problems:
        raise _all_of(problems)
    assert isinstance(target, str)
    nested = Path(target).name == "train"
    job = _job_of(read_layers(_find_mix(path, mix), []))
    out = str(Path(target).parent) if nested else target
    prepare = dataclasses.replace(job.prepare, out=out, **values)
    return dataclasses.replace(job, prepare=prepare, flat=not nested)


def _find_mix(training: Path, mix: str) -> Path:
    """The file of a mix: beside the training configuration, here, or shipped with the package."""
    folders = [training.parent / "data", Path("configs/data")]
    folders += [root / "configs" / "data" for root in (_PACKAGE, _PACKAGE.parent)]
    for folder in folders:
        if (folder / f"{mix}.yaml").is_file():
            return folder / f"{mix}.yaml"
    known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    hint = nearest(mix, known) or f" (mixes: {', '.join(known) or 'none'})"
    raise UserError(f"'data.data_mix' in {training}: no file configs/data/{mix}.yaml{hint}")


def _job_of(layers: list[tuple[Mapping[str, Any], str]]) -> PrepareJob:
    problems: list[str] = []
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    sources: list[SourceConfig] = []
    for content, source in layers:
        for section, body in content.items():
            if section == _LIST:
                sources = _typed_sources(body, source, problems)
            elif section not in _SECTIONS:
                known = (*_SECTIONS, _LIST)
                hint = nearest(section, known) or f" (sections: {', '.join(known)})"
                problems.append(f"unknown section {named(section, {section: source})}{hint}")
            elif isinstance(body, Mapping):
                values[section] |= _typed_section(
                    _SECTIONS[section], body, section, f" in {source}", problems
                )
            elif body is not None:
                problems.append(f"section '{section}' in {source} must hold key: value pairs")
    if problems:
        raise _all_of(problems)
    return PrepareJob(
        prepare=PrepareConfig(**values["prepare"]),
        sources=tuple(sources),
        clean=CleanConfig(**values["clean"]),
        dedup=DedupConfig(**values["dedup"]),
    )


def _typed_sources(body: Any, source: str, problems: list[str]) -> list[SourceConfig]:
    if not isinstance(body, list) or not all(isinstance(entry, Mapping) for entry in body):
        problems.append(f"'{_LIST}' in {source} must be a list of sources, each with a name")
        return []
    found = []
    for number, entry in enumerate(body):
        where = f"{_LIST}[{number}]"
        values = _typed_section(SourceConfig, entry, where, f" in {source}", problems)
        if "name" not in entry:
            problems.append(f"'{where}' in {source} needs a name")
        elif "name" in values:
            found.append(SourceConfig(**values))
    return found


def _typed_section(
    schema: type, body: Mapping[Any, Any], section: str, where: str, problems: list[str]
) -> dict[str, Any]:
    """The values of a section that fit; a sentence in `problems` for each that does not."""
    annotations = {f.name: str(f.type) for f in dataclasses.fields(schema)}
    values = {}
    for name, value in body.items():
        dotted = f"'{section}.{name}'{where}"
        if name not in annotations:
            hint = nearest(str(name), annotations) or f" (keys: {', '.join(annotations)})"
            problems.append(f"unknown key {dotted}{hint}")
            continue
        try:
            if annotations[name].startswith("tuple"):
                values[name] = _strings(value)
            else:
                values[name] = typed(schema, name, value)
        except UserError as problem:
            problems.append(f"{dotted} {problem}")
    return values


def _strings(value: Any) -> tuple[str, ...]:
    """One string, or a list of them."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise UserError(f"needs a string or a list of strings, got {value!r}")
    return tuple(strings)


def _all_of(problems: list[str]) -> UserError:
    count = "" if len(problems) == 1 else f"{len(problems)} problems: "
    return UserError(f"{count}{'; '.join(problems)}.")


def check_job(job: PrepareJob) -> None:
    """Ranges and relations of all settings; `UserError` with all problems in one message."""
    prepare, problems = job.prepare, list[str]()

    def need(ok: bool, name: str, rule: str, value: Any) -> None:
        if not ok:
            problems.append(f"{name} must be {rule}, not {value!r}")

    need(bool(prepare.out), "prepare.out", "the folder to make (or use --out)", prepare.out)
    val_fraction, max_tokens = prepare.val_fraction, prepare.max_tokens
    need(0 <= val_fraction < 1, "val_fraction", "at least 0 and below 1", val_fraction)
    need(prepare.shard_size_tokens >= 1, "shard_size_tokens", "at least 1",
         prepare.shard_size_tokens)  # fmt: skip
    need(max_tokens == 0 or max_tokens >= 2, "max_tokens",
         "at least 2 (a token and its EOS), or 0 for all", max_tokens)  # fmt: skip
    need(prepare.workers >= 0, "workers", "0 or more", prepare.workers)
    need(0 <= prepare.seed < 2**63, "seed", "between 0 and 2^63 - 1", prepare.seed)
    for name, names in (("on_exhausted", OnExhausted), ("invalid_utf8", InvalidUtf8)):
        value, known = getattr(prepare, name), get_args(names)
        need(value in known, name, f"one of {', '.join(known)}{nearest(value, known)}", value)
    threshold = job.dedup.near_threshold
    need(0.1 <= threshold <= 0.95, "dedup.near_threshold", "between 0.1 and 0.95", threshold)
    problems += _source_problems(job.sources)
    if problems:
        raise _all_of(problems)


def _source_problems(sources: tuple[SourceConfig, ...]) -> list[str]:
    problems = [] if sources else ["no sources; name at least one"]
    names: set[str] = set()
    for source in sources:
        if not _NAME.fullmatch(source.name):
            problems.append(f"source name {source.name!r} may hold letters, digits and . _ - only")
        if source.name.lower() in names:
            problems.append(f"source name {source.name!r} is used twice")
        if not 0 < source.weight < math.inf:
            problems.append(
                f"weight of source {source.name!r} must be a positive number, not {source.weight}"
            )
        names.add(source.name.lower())
    return problems


def settings_of(job: PrepareJob, identity: Callable[[SourceConfig], str]) -> dict[str, Any]:
    """What the output depends on, JSON-ready, by name; `identity` is the state of a source."""
    ignored = ("out", "workers")
    settings: dict[str, Any] = {
        name: value
        for name, value in dataclasses.asdict(job.prepare).items()
        if name not in ignored
    }
    settings |= {"clean": dataclasses.asdict(job.clean), "dedup": dataclasses.asdict(job.dedup)}
    settings["flat"] = job.flat
    settings["source names"] = [source.name for source in job.sources]
    for source in job.sources:
        # Lists, as they come back from JSON.
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(source).items()}
        settings[f"source {source.name}"] = {**values, "input": identity(source)}
    return settings
