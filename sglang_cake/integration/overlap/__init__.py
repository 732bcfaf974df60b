"""The hook around each forward, and last steps that begin while their last blocks arrive."""
