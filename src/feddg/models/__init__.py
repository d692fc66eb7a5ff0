"""Models: backbones by name, the network (featurizer and classifier), normalisation."""
