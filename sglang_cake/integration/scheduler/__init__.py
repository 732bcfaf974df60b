"""Hooks of SGLang's scheduler: the poll of every step, the queue, admission."""
