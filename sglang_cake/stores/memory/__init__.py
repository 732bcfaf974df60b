"""A store in host memory, usually the first tier."""
