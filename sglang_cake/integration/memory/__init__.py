"""The radix cache, device slots, copies of KV rows.

Terms: docs/glossary.md (staged, placed, reserved slots, end state, copier).
"""
