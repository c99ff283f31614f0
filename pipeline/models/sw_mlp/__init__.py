"""SW-MLP: MLPs with frozen random masks on their weights (Hayase & Karakida 2024)."""
