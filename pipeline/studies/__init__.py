"""Studies: runs of recipes that differ in a few keys, started one by one and reported together."""
