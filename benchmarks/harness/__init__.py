"""Surroundings for parts of the package, for benchmarks and tests: links with limits and faults,
SGLang's scheduler loop on a virtual GPU in virtual time, and a model.
"""
