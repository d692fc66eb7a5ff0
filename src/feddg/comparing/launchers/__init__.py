"""Where the runs of a comparison go, one launcher a file: this machine, a Ray cluster, Slurm."""
