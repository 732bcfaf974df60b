"""A server of the package on a virtual clock, and the lowest possible time to first token."""
