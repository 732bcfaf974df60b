"""The format of a stored block: header and checksum (`frame`), and codecs that make it smaller."""
