"""Comparing: many runs that answer one question, carried out, pooled and set side by side."""
