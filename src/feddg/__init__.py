"""feddg: federated domain generalization."""
