"""MLPs on all pixels, without tokens."""
