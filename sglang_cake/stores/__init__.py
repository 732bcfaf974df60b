"""Stores of blocks: bytes by key, behind one interface (`base.Store`).

Terms: docs/glossary.md (block, namespace, key, tier, link, attached store).
"""
