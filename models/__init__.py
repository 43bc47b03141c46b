"""Pure functions of a transformer, and what loads their weights."""
