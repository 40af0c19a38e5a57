"""Many legal orders of one scenario: of its ranks' turns, and of what its devices run."""
