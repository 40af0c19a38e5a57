"""The bench: everything needed to judge the hooks in `real` without a GPU."""
