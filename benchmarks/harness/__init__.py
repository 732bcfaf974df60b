"""For benchmarks and tests: links with limits and faults, and a tiny DeepSeek."""
