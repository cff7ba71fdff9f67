"""Mamba-3-Lite: pretraining of language models built on a complex-valued state-space dual mixer.

from mamba3_lite import load

model = load("runs/quickstart")
print(model.generate("import "))
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``load`` brings torch with it, so it is imported when it is asked for."""
    if name == "load":
        return importlib.import_module("mamba3_lite.inference.api").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
