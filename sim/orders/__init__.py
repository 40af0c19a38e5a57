"""Legal orders of what a trace gives its devices to do, and what each order shows."""
