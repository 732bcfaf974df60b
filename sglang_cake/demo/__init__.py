"""Models and real servers for `sglang-cake demo`; tests and benchmarks use them too."""
