"""The command line itself: help, version, unknown commands, and how little --help loads."""

import subprocess
import sys
from pathlib import Path

import pytest

import mamba3_lite
from mamba3_lite.cli import COMMANDS, main

ROOT = Path(mamba3_lite.__file__).resolve().parents[1]


def said(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Standard output of a command that ends with ``code`` and prints no error."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert (stop.value.code or 0) == code
    assert captured.err == ""
    return captured.out


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(said(["--help"], capsys).replace("│", " ").split())
    assert "Examples: mamba3-lite quickstart" in text
    for name, (_, summary) in COMMANDS.items():
        assert f"{name} {summary}" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(said([name, "--help"], capsys).split())
    assert "Usage:" in text and "--help" in text
    example = text.index("Example")
    assert f"mamba3-lite {name}" in text[example:]


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    captured = capsys.readouterr()
    assert "Usage:" in captured.out + captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["--version"], capsys) == f"mamba3-lite {mamba3_lite.__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"), [("pretrian", "(did you mean 'pretrain'?)"), ("xyz", "commands: quickstart")]
)
def test_unknown_command(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([word])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: unknown command {word!r}") and hint in line


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["pretrain", "--configg", "x"], "--configg"),
        (["pretrain", "--resume", "soon"], "--resume"),
        (["prepare"], "inputs"),
    ],
)
def test_wrong_usage_points_at_the_help(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    complaints = capsys.readouterr().err
    assert complaint in complaints and f"{argv[0]} --help" in complaints
    assert "Traceback" not in complaints


def test_every_command_names_a_function_that_exists() -> None:
    for where, summary in COMMANDS.values():
        module, function = where.split(":")
        __import__(module)
        assert callable(getattr(sys.modules[module], function))
        assert summary.endswith(".")


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_no_heavy_package(argument: str) -> None:
    script = (
        "import sys\n"
        "from mamba3_lite.cli import main\n"
        "try:\n"
        f"    main([{argument!r}])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'triton', 'tiktoken', 'omegaconf', 'yaml'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"
