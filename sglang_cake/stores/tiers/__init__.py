"""Several stores as one: read by bandwidth, written down and moved up."""
