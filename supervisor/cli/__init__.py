"""allocctl: everything a person or a CI job types. One module per verb, lazy imports."""
