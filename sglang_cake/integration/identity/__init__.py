"""The namespace: weights, settings and environment that decide the meaning of KV."""
