"""Vision Permutator (Hou et al. 2021) with blocks of one size."""
