"""Directories and files that change: events are hints, a listing decides."""
