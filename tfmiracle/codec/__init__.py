"""What decoding needs, on NumPy alone."""
