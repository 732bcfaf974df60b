"""What every other part uses: settings, keys, layouts, errors. No SGLang, no torch.

Terms: docs/glossary.md (block, plane, group, namespace, shard, key).
"""
