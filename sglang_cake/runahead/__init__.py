"""KV-Runahead: several servers compute the front of one long prompt.

Terms: docs/glossary.md (member, span, chunk).
"""
