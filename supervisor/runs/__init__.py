"""Runs as their directories tell of them: found by name, read, and sealed with Slurm's truth when the job is over."""
