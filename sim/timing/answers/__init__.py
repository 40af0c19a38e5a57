"""What a reader asks: where a step goes, and what if."""
