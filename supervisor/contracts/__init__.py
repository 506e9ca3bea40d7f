"""What an artifact must contain. Each contract looks at the disk and answers with a Finding; it decides nothing."""
