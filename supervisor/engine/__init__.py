"""asyncio: one task group per run; carries out the machine's commands, feeds events back, writes the journal."""
