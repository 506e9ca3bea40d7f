"""What asyncio lacks: blocking work with a deadline that holds, and an event that weighs nothing."""
