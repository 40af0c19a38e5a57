"""Cost files made of measurements, and how far predictions were from others."""
