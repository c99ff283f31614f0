"""Studies: runs of recipes that differ in a few keys, started on one or several machines and reported together."""
