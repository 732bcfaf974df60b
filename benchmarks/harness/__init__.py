"""For benchmarks and tests: links with limits and faults, tiers in virtual time, and a tiny
DeepSeek."""
