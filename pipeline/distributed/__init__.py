"""Ranks: which one this is, which launcher started it, how it ended, and what ends all of them."""
