"""What is known of one live request."""
