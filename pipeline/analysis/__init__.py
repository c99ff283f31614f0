"""Numbers and images of what recipes and runs do."""
