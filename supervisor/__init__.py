"""allocd: an honest supervisor for multi-node Slurm jobs. Importing this package imports nothing else."""

__version__ = "0.1.0"
