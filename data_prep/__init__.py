"""Sources on disk, once, to one .beton per split and a manifest."""
