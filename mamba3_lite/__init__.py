"""Mamba-3-Lite: pretraining of a language model built on a complex-valued state-space dual mixer."""

__version__ = "0.1.0"
