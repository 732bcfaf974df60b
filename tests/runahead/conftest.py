"""Nothing here is slow, and nothing needs SGLang."""
