"""Private names of the trees that are tested, one module a kind of tree."""
