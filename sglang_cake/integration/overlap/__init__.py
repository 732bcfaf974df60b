"""The last step of a prompt, begun while its last blocks arrive."""
