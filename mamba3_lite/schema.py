"""YAML files and dotted overrides into typed dataclass fields, with the source of every value.

OmegaConf reads, merges and types the values; what this module adds is the list of all problems at once, the nearest name for a
misspelt key, ``base:`` inheritance, and a record of where each value came from.
"""

import dataclasses
import difflib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mamba3_lite.errors import UserError


@dataclass(frozen=True)
class Key:
    """Where a YAML key goes: a field of an owner's dataclass."""

    owner: str
    schema: type
    field: str


Sections = Mapping[str, Mapping[str, Key]]


@dataclass
class ResolvedConfig:
    """``values[owner][field]`` for every key that was given, and ``sources["section.key"]`` for where it was given last."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def keys_of(
    owner: str,
    schema: type,
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
) -> dict[str, Key]:
    """YAML keys of a dataclass: its field names, some left out, some under another name (``rename``: field -> key)."""
    names = [f.name for f in dataclasses.fields(schema)] if only is None else list(only)
    rename = rename or {}
    return {
        rename.get(name, name): Key(owner, schema, name)
        for name in names
        if name not in set(exclude)
    }


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def typed(schema: type, name: str, value: Any) -> Any:
    """``value`` as the type of the dataclass field ``name``; raises ``UserError`` when it does not fit."""
    if value is None and schema.__dataclass_fields__[name].type in (int, float, str, bool):
        raise UserError("needs a value, got nothing")
    # A number is no name and a truth value is no number: OmegaConf would convert them silently.
    wanted = schema.__dataclass_fields__[name].type
    if isinstance(value, bool) and wanted in (int, float, str, "int", "float", "str"):
        raise UserError(f"needs {_type_name(wanted)}, got {str(value).lower()}")
    if wanted in (bool, "bool") and not isinstance(value, bool):
        raise UserError(f"needs true or false, got {value!r}")
    if isinstance(value, int | float) and wanted in (str, "str"):
        raise UserError(f"needs a string, got {value!r}")
    node = OmegaConf.create({"value": value})
    try:
        typed_node = OmegaConf.structured(schema)
        typed_node[name] = node["value"]
        result = typed_node[name]
    except OmegaConfBaseException as problem:
        raise UserError(f"needs {_type_name(wanted)}, got {value!r}") from problem
    return OmegaConf.to_container(result) if OmegaConf.is_config(result) else result


def _type_name(wanted: Any) -> str:
    names = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"}
    return names.get(getattr(wanted, "__name__", str(wanted)), f"a value of type {wanted}")


def read_config(
    path: str | Path | None, sections: Sections, overrides: Sequence[str] = ()
) -> ResolvedConfig:
    """Reads a YAML file (its ``base:`` first), then ``section.key=value`` overrides.

    Raises:
        UserError: every problem found, in one message.
    """
    resolved, problems = ResolvedConfig(), []
    layers = [] if path is None else _read_chain(Path(path), [])
    layers.append((_parse_overrides(overrides, problems), "command line"))
    for content, source in layers:
        _merge_layer(content, source, sections, resolved, problems)
    if problems:
        head = f"{path}: " if path is not None else ""
        listed = "; ".join(problems)
        count = "" if len(problems) == 1 else f"{len(problems)} problems: "
        raise UserError(f"{head}{count}{listed}")
    return resolved


def _merge_layer(
    content: Mapping[str, Any],
    source: str,
    sections: Sections,
    resolved: ResolvedConfig,
    problems: list[str],
) -> None:
    where = "" if source == "command line" else f" in {source}"
    for section, body in content.items():
        if section not in sections:
            known = nearest(str(section), sections)
            problems.append(f"unknown section {section!r}{where}{known}; sections: {', '.join(sections)}")
            continue
        if body is None:
            continue
        if not isinstance(body, Mapping):
            problems.append(f"section {section!r}{where} must hold key: value pairs, got {body!r}")
            continue
        for name, value in body.items():
            key = sections[section].get(name)
            if key is None:
                known = nearest(str(name), sections[section])
                problems.append(f"unknown key '{section}.{name}'{where}{known}")
                continue
            try:
                resolved.values.setdefault(key.owner, {})[key.field] = typed(
                    key.schema, key.field, value
                )
                resolved.sources[f"{section}.{name}"] = source
            except UserError as problem:
                problems.append(f"'{section}.{name}'{where} {problem}")


def _read_chain(path: Path, seen: list[Path]) -> list[tuple[Mapping[str, Any], str]]:
    """The file's layers, its ``base:`` (relative to the file) first."""
    if path.resolve() in seen:
        raise UserError(f"{path}: 'base:' leads back to a file that is already being read.")
    content = dict(_read_yaml(path))
    base = content.pop("base", None)
    layers = []
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{path}: 'base:' must be the path of another YAML file, got {base!r}.")
        layers = _read_chain(path.parent / base, [*seen, path.resolve()])
    return [*layers, (content, str(path))]


def _read_yaml(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"Configuration file {path} {reason}.")
    try:
        # OmegaConf's loader: 3e-4 is a number, a doubled key is an error.
        config = OmegaConf.load(io.StringIO(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        detail = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise UserError(f"{path}:{line} not readable as YAML: {detail}.") from problem
    if not isinstance(config, DictConfig):
        raise UserError(f"{path}: a configuration is sections of key: value pairs, not a list.")
    try:
        content = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as problem:
        raise UserError(f"{path}: {str(problem).splitlines()[0]}.") from problem
    assert isinstance(content, dict)
    return {str(name): body for name, body in content.items()}


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        section, dot, name = dotted.partition(".")
        if not (equals and dot and section and name) or "." in name:
            problems.append(f"override {override!r} must look like section.key=value (training.lr=6e-4)")
            continue
        try:
            value = OmegaConf.create(f"value: {text}" if text else "value: ''")["value"]
        except (yaml.YAMLError, OmegaConfBaseException):
            value = text
        content.setdefault(section, {})[name] = (
            OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        )
    return content
