"""allocd, the daemon: holds allocations, and answers for them on a Unix socket. It decides nothing about a run; engines
are processes of their own, and none of them is harmed when the daemon goes."""
