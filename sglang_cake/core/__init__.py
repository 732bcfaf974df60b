"""Basic types of all packages: keys, layouts, buffers, errors. Imports neither SGLang nor torch.

Terms: docs/glossary.md (block, plane, group, namespace, shard, key).
"""
