"""What happens to an update on its way: clipping, noise, robust aggregation; for every method.

``base`` holds the hooks, ``chain`` what the round loop calls, ``compatibility`` which methods and
defences go together. Every other module is one defence.
"""
