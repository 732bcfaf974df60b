"""What decides the meaning of KV: weights, settings, environment."""
