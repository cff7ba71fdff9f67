"""The import contract: arrows go down, Triton stays in its room, the training path needs little.

The levels are read from the table of ``docs/architecture.md``, so page and code cannot drift apart.
"""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mamba3_lite"
# What an export copies is imported from there by transformers; its own test holds its imports.
COPIED = ROOT / PACKAGE / "export" / "remote"
SOURCES = sorted(p for p in (ROOT / PACKAGE).rglob("*.py") if not p.is_relative_to(COPIED))

OPTIONAL = ("triton", "wandb", "tensorboard", "matplotlib", "tokenizers", "transformers", "pyarrow")
TRAINING_PATH = (
    "torch",
    "numpy",
    "PyYAML",
    "omegaconf",
    "safetensors",
    "tiktoken",
    "rich",
    "typer",
)

# Hiding a package is closer to its absence than an error from a finder of ours:
# `importlib.util.find_spec` then answers None, as on a machine that lacks it.
HIDING_PREAMBLE = """
import importlib, importlib.util, json, sys

class Hiding:
    def __init__(self, finder, hidden):
        self.finder, self.hidden = finder, hidden
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.hidden:
            return None
        return self.finder.find_spec(name, path, target)

def hide(names):
    sys.meta_path[:] = [Hiding(finder, frozenset(names)) for finder in sys.meta_path]
    for name in names:
        assert name not in sys.modules, f"{name} was imported before it could be hidden"
        assert importlib.util.find_spec(name) is None, f"{name} is not hidden"

job = json.loads(sys.argv[1])
hide(job["hidden"])
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """First name below the package; the package itself (its version) is the room ''."""
    return module.split(".")[1] if "." in module else ""


def read_levels(page: str) -> dict[str, int]:
    """Room → level, from the table rows ``| level | names in backticks | may import |``."""
    levels = {}
    for level, cell in re.findall(r"^\| (\d+) \| ([^|]*) \|", page, flags=re.MULTILINE):
        without_remarks = re.sub(r"\([^)]*\)", "", cell)
        for name in re.findall(r"`(\w+)(?:/|\.py)`", without_remarks):
            levels[name] = int(level)
    return levels


LEVELS = read_levels((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


def imported_names(node: ast.stmt, module: str, is_package: bool) -> list[str]:
    """Absolute dotted names that one statement imports; ``from a import b`` gives ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = module.split(".")
        parents = parents[: len(parents) - node.level + is_package]
        base = ".".join([*parents, base] if base else parents)
    return [f"{base}.{alias.name}" for alias in node.names]


def runs_at_import(node: ast.AST) -> bool:
    """False for functions and for ``if TYPE_CHECKING``."""
    if isinstance(node, ast.If):
        return not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    return not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def statements(tree: ast.AST, *, only_at_import: bool) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if runs_at_import(node) or not only_at_import:
            yield from statements(node, only_at_import=only_at_import)


def imports(
    source: str, module: str, *, is_package: bool = False, only_at_import: bool = False
) -> list[str]:
    return [
        name
        for node in statements(ast.parse(source), only_at_import=only_at_import)
        for name in imported_names(node, module, is_package)
    ]


def imports_of_file(path: Path, *, only_at_import: bool = False) -> list[str]:
    return imports(
        path.read_text(encoding="utf-8"),
        module_name(path),
        is_package=path.name == "__init__.py",
        only_at_import=only_at_import,
    )


def wrong_arrows(module: str, names: list[str]) -> list[str]:
    """Imports of a module that the table forbids, each as ``module -> room``."""
    home = room_of(module)
    wrong = []
    for name in names:
        if name.split(".")[0] != PACKAGE:
            continue
        room = room_of(name)
        # Its own room, the package itself, or an attribute of the package such as __version__.
        if room in (home, "") or (room not in LEVELS and name.count(".") == 1):
            continue
        if home == "":
            allowed = False  # importing the package must stay free of work
        elif LEVELS[home] == 0:
            allowed = room == "errors"
        else:
            allowed = LEVELS.get(room, LEVELS[home]) < LEVELS[home]
        if not allowed:
            wrong.append(f"{module} -> {room}")
    return wrong


def test_the_table_is_read_whole() -> None:
    assert LEVELS["errors"] == 0 and LEVELS["kernels"] == 1 and LEVELS["cli"] == 6
    assert LEVELS["inference"] < LEVELS["evaluation"] == 4 < LEVELS["measure"]
    assert set(LEVELS.values()) == set(range(7))


def test_every_room_stands_in_the_table() -> None:
    rooms = {room_of(module_name(path)) for path in SOURCES} - {""}
    assert rooms <= LEVELS.keys(), f"add to docs/architecture.md: {rooms - LEVELS.keys()}"


def test_arrows_go_down() -> None:
    wrong = [w for path in SOURCES for w in wrong_arrows(module_name(path), imports_of_file(path))]
    assert not wrong


@pytest.mark.parametrize(
    ("module", "source", "is_wrong"),
    [
        ("mamba3_lite.models.mimo", "from mamba3_lite.kernels import per_chunk", False),
        ("mamba3_lite.models.mimo", "from mamba3_lite import __version__", False),
        ("mamba3_lite.models.mimo", "from .transformer import ModelConfig", False),
        ("mamba3_lite.models.mimo", "import mamba3_lite", False),
        ("mamba3_lite.models.mimo", "from mamba3_lite.attic.old import thing", True),
        ("mamba3_lite.env", "from mamba3_lite.errors import UserError", False),
        ("mamba3_lite.models.mimo", "import mamba3_lite.training.optim", True),
        ("mamba3_lite.models.mimo", "from ..training import optim", True),
        ("mamba3_lite.models.mimo", "from .. import training", True),
        ("mamba3_lite.models.mimo", "def f():\n    from mamba3_lite import training", True),
        ("mamba3_lite.data.shards", "from mamba3_lite.utils import checkpoint", True),
        ("mamba3_lite.training.guard", "if 1:\n    import mamba3_lite.inference.sampling", True),
        ("mamba3_lite.schema", "from mamba3_lite.env import read", True),
        ("mamba3_lite", "from mamba3_lite.models import transformer", True),
    ],
)
def test_a_planted_arrow_is_judged_right(module: str, source: str, is_wrong: bool) -> None:
    assert bool(wrong_arrows(module, imports(source, module))) is is_wrong


def test_a_package_resolves_its_own_relative_imports() -> None:
    names = imports("from ..training import optim", "mamba3_lite.models", is_package=True)
    assert names == ["mamba3_lite.training.optim"]


def test_only_kernels_imports_triton_at_module_level() -> None:
    importers = {
        module_name(path)
        for path in SOURCES
        for name in imports_of_file(path, only_at_import=True)
        if name.split(".")[0] == "triton"
    }
    outside = {module for module in importers if room_of(module) != "kernels"}
    assert not outside


def test_module_level_is_told_from_function_level() -> None:
    source = """
try:
    import triton
except ImportError:
    pass
if TYPE_CHECKING:
    import tokenizers
def f():
    import wandb
"""
    assert imports(source, "m", only_at_import=True) == ["triton"]
    assert imports(source, "m") == ["triton", "tokenizers", "wandb"]


def run_hidden(script: str, *, hidden: set[str], **job: object) -> str:
    """Standard output of ``script`` in a fresh interpreter that cannot find ``hidden``."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            HIDING_PREAMBLE + script,
            json.dumps({"hidden": sorted(hidden), **job}),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def closure(names: tuple[str, ...]) -> set[str]:
    """Canonical names of installed distributions that ``names`` need, themselves included."""
    known: set[str] = set()
    waiting = [str(canonicalize_name(name)) for name in names]
    while waiting:
        name = waiting.pop()
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        known.add(name)
        needed = [r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate()]
        waiting += [n for n in (str(canonicalize_name(r.name)) for r in needed) if n not in known]
    return known


ALLOWED = closure(TRAINING_PATH)


def installed_but_needless() -> set[str]:
    """Top-level modules of installed distributions that a plain install does not bring.

    Without those that every interpreter here loads at its start, which are not ours to hide.
    """
    owners = importlib.metadata.packages_distributions()
    needless = {
        top
        for top, names in owners.items()
        if top.isidentifier()
        and top not in {PACKAGE, *sys.stdlib_module_names}
        and not {str(canonicalize_name(name)) for name in names} & ALLOWED
    }
    at_start = run_hidden("print(json.dumps(sorted(sys.modules)))", hidden=set())
    return needless - {name.partition(".")[0] for name in json.loads(at_start)}


def test_the_base_dependencies_are_all_installed() -> None:
    assert {str(canonicalize_name(name)) for name in TRAINING_PATH} <= ALLOWED


def test_everything_but_kernels_imports_after_a_plain_install() -> None:
    """No extra, and nothing that merely happens to be installed here, is needed to import."""
    modules = [
        module
        for module in map(module_name, SOURCES)
        if room_of(module) != "kernels" and not module.endswith("__main__")
    ]
    hidden = {*OPTIONAL, *installed_but_needless()}
    assert "pytest" in hidden
    script = "for name in job['modules']: importlib.import_module(name); print(name)"
    assert run_hidden(script, hidden=hidden, modules=modules).split() == modules


def test_the_training_path_loads_only_its_own_packages() -> None:
    """Hiding, not watching: third parties import each other's packages where they find them."""
    hidden = {*OPTIONAL, *installed_but_needless()}
    script = f"""
importlib.import_module("{PACKAGE}.training.pretrain")
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
    loaded = set(json.loads(run_hidden(script, hidden=hidden)))
    assert {"torch", PACKAGE} <= loaded
    assert not loaded & hidden


def third_party(names: list[str]) -> set[str]:
    tops = {name.split(".")[0] for name in names}
    return tops - {PACKAGE} - sys.stdlib_module_names


def test_module_level_imports_are_on_the_short_list() -> None:
    """Outside kernels/, whatever else is needed is imported by the function that needs it."""
    short_list = {"yaml" if name == "PyYAML" else name for name in TRAINING_PATH}
    longer = {
        module_name(path): extra
        for path in SOURCES
        if room_of(module_name(path)) != "kernels"
        and (extra := third_party(imports_of_file(path, only_at_import=True)) - short_list)
    }
    assert not longer


def test_the_launcher_runs_its_own_checkout(tmp_path: Path) -> None:
    """``python3 training/pretrain.py`` from any folder, even beside another installed copy."""
    decoy = tmp_path / PACKAGE
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise AssertionError('the wrong copy')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "training" / "pretrain.py"), "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--dry-run" in done.stdout
