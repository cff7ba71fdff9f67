"""The table of environment variables is the only door to the process environment."""

import ast
from pathlib import Path

import pytest

import mamba3_lite
from mamba3_lite import env
from mamba3_lite.errors import UserError

PACKAGE = Path(mamba3_lite.__file__).parent
DEFAULTS = {
    "ENABLE_TRITON_KERNELS": "0",
    "TRITON_PER_CHUNK_NUM_STAGES": "1",
    "TRITON_PER_CHUNK_NUM_WARPS": "4",
    "TRITON_INTERPRET": "0",
    "MAMBA3_LITE_CACHE": "~/.cache/mamba3_lite",
    "TORCH_COMPILE_MODE": "",
    "CC": "",
    "WORLD_SIZE": "",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "WANDB_PROJECT": "",
    "WANDB_RUN_NAME": "",
}
READERS = {"environ", "environb", "getenv", "getenvb"}


def environment_reads(source: str) -> list[int]:
    """Line numbers on which the source touches the process environment through ``os``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in READERS]
    return lines


def test_table_holds_the_documented_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {variable.name: variable.default for variable in env.VARIABLES} == DEFAULTS
    assert all(variable.meaning.endswith(".") for variable in env.VARIABLES)
    for name, default in DEFAULTS.items():
        monkeypatch.delenv(name, raising=False)
        assert env.read(name) == default
        assert not env.is_set(name)


def test_set_values_win_over_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PER_CHUNK_NUM_WARPS", "8")
    monkeypatch.setenv("WANDB_PROJECT", "")
    assert env.read("TRITON_PER_CHUNK_NUM_WARPS") == "8"
    assert env.read_int("TRITON_PER_CHUNK_NUM_WARPS") == 8
    assert env.is_set("TRITON_PER_CHUNK_NUM_WARPS")
    assert not env.is_set("WANDB_PROJECT")


def test_a_value_that_is_no_integer_names_variable_and_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_PER_CHUNK_NUM_STAGES", "two")
    with pytest.raises(UserError, match="TRITON_PER_CHUNK_NUM_STAGES='two' is not an integer"):
        env.read_int("TRITON_PER_CHUNK_NUM_STAGES")


@pytest.mark.parametrize("reader", [env.read, env.read_int, env.is_set])
def test_unlisted_names_are_refused(reader) -> None:
    with pytest.raises(AssertionError, match="HOME is not in"):
        reader("HOME")


def test_only_env_reads_the_environment() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := environment_reads(path.read_text(encoding="utf-8")))
    }
    assert set(found) == {"env.py"}


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ"],
)
def test_the_search_finds_every_spelling(source: str) -> None:
    assert environment_reads(source)
