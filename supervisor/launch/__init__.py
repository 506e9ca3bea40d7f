"""How a rank starts, is stopped, killed and looked for: local processes, srun steps."""
