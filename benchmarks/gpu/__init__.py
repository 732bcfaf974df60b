"""Checks of one NVIDIA GPU: run as `python -m benchmarks.gpu.check` from the repository's root."""
