"""What the engine, the service and their clients need where nothing may hang: threads with a deadline, files that
cannot hold one up, an event that weighs nothing."""
