"""Defences: clipping, noise, robust aggregation and secure aggregation, for every method.

``defence`` has the hooks and which methods and defences fit together, ``building`` makes a run's
defences, ``accounting`` counts epsilon. Every other module holds defences.
"""
