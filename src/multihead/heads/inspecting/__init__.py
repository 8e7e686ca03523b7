"""One text read once: what every head does with it."""
