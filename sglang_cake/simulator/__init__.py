"""The decisions of the package on a virtual clock, and what the ideal would have been."""
