"""What runs and recipes do, as numbers and pictures."""
