"""A store in Mooncake's distributed memory."""
