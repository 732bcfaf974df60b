"""Basic types of all packages: settings, keys, layouts, errors. Imports neither SGLang nor torch.

Terms: docs/glossary.md (block, plane, group, namespace, shard, key).
"""
