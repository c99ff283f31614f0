"""MLP-Mixer and S-Mixer with any permutations (Tolstikhin et al. 2021; Hayase & Karakida 2024)."""
