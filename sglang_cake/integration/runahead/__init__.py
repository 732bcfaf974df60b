"""KV-Runahead inside of SGLang."""
