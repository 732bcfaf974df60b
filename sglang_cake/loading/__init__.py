"""The decisions about prompts, and the loader that carries them out.

Terms: docs/glossary.md (front, island, hole, claim, meet, meeting point, target).
"""
