"""A store in a folder: one file for each block, an index in SQLite, and eviction."""
