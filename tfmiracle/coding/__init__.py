"""Coding a sample of a posterior: one module for each coder."""
