"""Benchmarks: run as `python -m benchmarks.bench_<name>` from the repository's root."""
