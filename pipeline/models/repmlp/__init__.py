"""RepMLP (Ding et al. 2022) with blocks of one size."""
