"""What can be learnt of images from what leaves a site: attacks on finished runs, measured.

``attack`` carries one out and keeps its rows; ``entries`` finds what a method sends beside weights;
``senders`` asks the method what clients would send; ``reconstruction`` (with its ``generator``),
``inversion`` and ``membership`` are the attacks; ``image_metrics`` and ``extractors`` judge.
"""
