"""Prepares datasets: reads a source on disk, and writes one .beton per split and a manifest."""
