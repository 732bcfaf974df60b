"""A store in an S3 bucket."""
