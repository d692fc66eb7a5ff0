"""Methods: one federated algorithm per file."""
