"""The facts about one live request."""
