"""Accuracy by domain and subgroup, further metrics, their intervals."""
