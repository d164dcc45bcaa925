"""The posterior Q: its mathematics, and one module for each parameterization."""
