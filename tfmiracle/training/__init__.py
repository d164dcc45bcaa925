"""Training under the budget, coding, and the whole way in one call."""
