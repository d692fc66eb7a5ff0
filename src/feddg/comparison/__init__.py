"""Comparisons: many runs that answer one question, how they are run, and their results."""
