"""The write pipeline: new blocks on their way into the store."""
