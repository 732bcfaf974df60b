"""Header and checksum of a stored block, and conversion between arrays and bytes."""
