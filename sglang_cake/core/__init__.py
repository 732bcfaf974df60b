"""What every other part uses: settings, keys, layouts, errors. No SGLang, no torch."""
