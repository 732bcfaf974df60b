"""The HTTP store: its client, and the server of `sglang-cake store serve`."""
