"""The program beside each rank, and what builds it. Nothing here is imported by the agent itself.

`agent.py` is one file of plain standard library for Python 3.9 and later; `build.py` packs it into the
archive that is copied to a node and started there as `python -I -S agent.pyz run NONCE RANK`."""
