"""Models: backbones by name, the featurizer + classifier network, normalisation."""
