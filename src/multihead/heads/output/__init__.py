"""What heads write, beside what they read."""
