"""Tests of what answers on the socket."""
