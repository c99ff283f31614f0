"""ResMLP and gMLP of any size."""
