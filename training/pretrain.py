"""Launcher for a checkout: ``python3 training/pretrain.py ...``, installed or not."""

import sys
from pathlib import Path

# First, so that this checkout wins over an installed copy and over this folder's own name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mamba3_lite.training.pretrain import main

if __name__ == "__main__":
    main()
