"""Mamba-3-Lite: pretraining of language models built on a complex-valued state-space dual mixer."""

__version__ = "0.1.0"
