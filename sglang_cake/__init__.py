"""Compute and load: a radix-cache extension of SGLang that restores stored KV from both ends."""

__version__ = "0.1.0"
