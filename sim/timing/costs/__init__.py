"""What everything in a trace costs, from a cost file."""
