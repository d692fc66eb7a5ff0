"""Test-time adaptations, a registered definition each: see :mod:`feddg.evaluation.adaptation`."""
