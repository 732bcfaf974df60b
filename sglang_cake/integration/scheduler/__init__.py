"""Hooks of SGLang's scheduler: the poll of every step, the queue, admission.

Terms: docs/glossary.md (record, claim, last step, fetched).
"""
