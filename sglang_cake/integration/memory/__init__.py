"""The radix cache, device slots, copies of KV rows."""
