"""Baselines with patches."""
