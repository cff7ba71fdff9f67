"""The one error that stands for a user's mistake."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake the user can put right: the message names what is wrong, where, and the way out.

    The command line prints the message as one line and exits with code 2. Every other exception is
    a bug of ours and keeps its traceback.
    """


@contextmanager
def user_errors_as_one_line() -> Iterator[None]:
    """A ``UserError`` becomes one ``error: ...`` line on standard error and exit code 2.

    Anything else passes through.
    """
    try:
        yield
    except UserError as problem:
        # A path, a key or a library's reason may hold line ends of its own.
        print("error:", *str(problem).split(), file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def reading(what: str, way_out: str) -> Iterator[None]:
    """An ``OSError`` inside, such as a folder that may not be entered, becomes a ``UserError``."""
    try:
        yield
    except OSError as problem:
        raise UserError(f"{what}: cannot be read ({problem.strerror}); {way_out}") from problem
