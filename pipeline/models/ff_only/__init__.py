"""FF-only: a ViT with feed-forward layers over tokens in place of attention (Melas-Kyriazi 2021)."""
