"""The whole behaviour, pure: what happened -> what to do. No I/O, no clock, no asyncio, standard library only."""
