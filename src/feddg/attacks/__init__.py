"""Attacks on finished runs: they measure what messages to the server reveal about images.

``attack`` runs an attack and stores its results; ``senders`` finds what a method sends and what
clients would send; ``reconstruction``, ``inversion`` and ``membership`` are the attacks;
``image_metrics`` compares images.
"""
