"""YAML files and dotted overrides into typed dataclass fields, with the source of every value.

OmegaConf reads the files and types what is no plain scalar; what this module adds is strict
scalars, the list of all problems at once, the nearest name for a misspelt key, ``base:``
inheritance, and a record of where each value came from.
"""

import dataclasses
import difflib
import io
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mamba3_lite.errors import UserError

COMMAND_LINE = "the command line"

# Type name of a field: what a message calls it, and what a YAML may hold for it.
_SCALARS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "int": ("a whole number", int),
    "float": ("a number", (int, float)),
    "bool": ("true or false", bool),
    "str": ("a string", str),
}
# A whole section given as a value must not fill the screen.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True)
class Key:
    """Where a YAML key goes: a field of an owner's dataclass."""

    owner: str
    schema: type
    field: str


Sections = Mapping[str, Mapping[str, Key]]


@dataclass
class ResolvedConfig:
    """What was given: ``values[owner][field]``, and where last: ``sources["section.key"]``."""

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
    """YAML keys of a dataclass: its field names, some left out, some renamed (field -> key)."""
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
    """``value`` as the type of the dataclass field ``name``; ``UserError`` when it does not fit."""
    annotation = next(f.type for f in dataclasses.fields(schema) if f.name == name)
    wanted = getattr(annotation, "__name__", str(annotation))
    if wanted in _SCALARS:
        needed, accepted = _SCALARS[wanted]
        # A truth value is a number to Python, and OmegaConf would turn numbers into names.
        fits = isinstance(value, accepted) and isinstance(value, bool) == (wanted == "bool")
        if not fits:
            quotes = wanted == "str" and isinstance(value, int | float)
            hint = "; put it in quotes" if quotes else ""
            raise UserError(f"needs {needed}, got {_shown(value)}{hint}")
        return float(value) if wanted == "float" else value
    try:
        node = OmegaConf.structured(schema)
        node[name] = value
        result = node[name]
    except OmegaConfBaseException as problem:
        raise UserError(f"needs a value of type {wanted}, got {_shown(value)}") from problem
    return OmegaConf.to_container(result) if OmegaConf.is_config(result) else result


def _shown(value: Any) -> str:
    """A value as a YAML would spell it, cut when it is long."""
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else _SHORT.repr(value)


def named(key: str, sources: Mapping[str, str]) -> str:
    """How a message calls a value: its ``section.key`` and, unless it is a default, its source."""
    source = sources.get(key)
    if source is None:
        return f"'{key}'"
    return f"'{key}' {'on' if source == COMMAND_LINE else 'in'} {source}"


def read_config(
    path: str | Path | None,
    sections: Sections,
    *,
    environment: Mapping[str, tuple[str, str]] | None = None,
    overrides: Sequence[str] = (),
    check: Callable[[ResolvedConfig], Sequence[str]] = lambda resolved: (),
) -> ResolvedConfig:
    """Reads a YAML file (its ``base:`` first), then the environment, then overrides.

    Args:
        environment: for each variable that is set, the ``section.key`` it means and its text.
        overrides: ``section.key=value`` of the command line.
        check: finds the further problems of the values that could be read.

    Raises:
        UserError: every problem found, in one message.
    """
    resolved = ResolvedConfig()
    problems: list[str] = []
    layers = [] if path is None else read_layers(Path(path), [])
    for variable, (key, text) in (environment or {}).items():
        section, _, name = key.partition(".")
        layers.append(({section: {name: text}}, f"environment variable {variable}"))
    layers.append((_parse_overrides(overrides, problems), COMMAND_LINE))
    for content, source in layers:
        _merge_layer(content, source, sections, resolved, problems)
    problems += check(resolved)
    if problems:
        count = "" if len(problems) == 1 else f"{len(problems)} problems: "
        raise UserError(f"{count}{'; '.join(problems)}.")
    return resolved


def _merge_layer(
    content: Mapping[str, Any],
    source: str,
    sections: Sections,
    resolved: ResolvedConfig,
    problems: list[str],
) -> None:
    for section, body in content.items():
        where = named(section, {section: source})
        if section not in sections:
            known = nearest(section, sections) or f" (sections: {', '.join(sections)})"
            problems.append(f"unknown section {where}{known}")
            continue
        if body is None:
            continue
        if not isinstance(body, Mapping):
            problems.append(f"section {where} must hold key: value pairs, got {_shown(body)}")
            continue
        for name, value in body.items():
            dotted = f"{section}.{name}"
            where = named(dotted, {dotted: source})
            key = sections[section].get(name)
            if key is None:
                problems.append(f"unknown key {where}{_place_of(str(name), section, sections)}")
                continue
            try:
                resolved.values.setdefault(key.owner, {})[key.field] = typed(
                    key.schema, key.field, value
                )
                resolved.sources[dotted] = source
            except UserError as problem:
                problems.append(f"{where} {problem}")


def _place_of(name: str, section: str, sections: Sections) -> str:
    """The way out for an unknown key: the section it belongs to, a near name, or all names."""
    for other, keys in sections.items():
        if name in keys:
            return f" (it belongs to section {other!r})"
    by_field = {key.field: known for known, key in sections[section].items()}
    if name in by_field:
        return f" (did you mean {by_field[name]!r}?)"
    return nearest(name, sections[section]) or f" (keys: {', '.join(sections[section])})"


def read_layers(path: Path, children: list[Path]) -> list[tuple[Mapping[str, Any], str]]:
    """The file's layers, its ``base:`` (relative to the file) first."""
    if path.resolve() in [child.resolve() for child in children]:
        chain = " -> ".join(map(str, [*children, path]))
        raise UserError(f"{path}: 'base:' leads in a circle ({chain}); remove one of them.")
    content = dict(_read_yaml(path, children))
    base = content.pop("base", None)
    layers = []
    if base is not None:
        if not isinstance(base, str):
            raise UserError(
                f"{path}: 'base:' must be the path of another YAML file, got {_shown(base)}."
            )
        layers = read_layers(path.parent / base, [*children, path])
    return [*layers, (content, str(path))]


def _read_yaml(path: Path, children: Sequence[Path]) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise UserError(f"{path}: not readable as UTF-8 ({problem}); save it as UTF-8.") from None
    except OSError as problem:
        hint = f"correct 'base:' in {children[-1]}" if children else "check --config"
        reason = str(problem.strerror).lower()
        raise UserError(f"configuration file {path}: {reason}; {hint}.") from problem
    try:
        # OmegaConf's loader: 3e-4 is a number, a doubled key is an error.
        config = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OSError) as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        detail = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise UserError(
            f"{path}:{line} not readable as YAML ({detail}); mend it there."
        ) from problem
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
            problems.append(
                f"override {override!r} must look like section.key=value (training.lr=6e-4)"
            )
            continue
        try:
            parsed = OmegaConf.create(f"value: {text}" if text else "value: ''")
            assert isinstance(parsed, DictConfig)
            value = parsed["value"]
        except (yaml.YAMLError, OmegaConfBaseException):
            value = text
        content.setdefault(section, {})[name] = (
            OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        )
    return content


def find_config(path: str | Path) -> Path:
    """The file itself, or outside a checkout the copy of ``configs/...`` in the package."""
    package = Path(__file__).resolve().parent
    for candidate in (Path(path), package / path, package.parent / path):
        # Not Path.is_file: that raises for a folder which may not be entered.
        if os.path.isfile(candidate):
            return candidate
    return Path(path)
