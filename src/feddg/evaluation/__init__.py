"""Evaluation: accuracy per domain, and which round is reported."""
