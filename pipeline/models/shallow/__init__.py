"""Shallow MLPs of dense, Monarch and Kronecker matrices (Hayase & Karakida 2024, figure 2d)."""
