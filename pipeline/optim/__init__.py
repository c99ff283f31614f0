"""Optimizers: parameter groups, torch's and timm's optimizers, and our own."""
