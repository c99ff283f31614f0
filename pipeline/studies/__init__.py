"""Studies: recipes that differ in a few numbers, run cell by cell and drawn together."""
