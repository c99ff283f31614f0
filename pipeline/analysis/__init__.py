"""Numbers and pictures of what recipes and runs do."""
