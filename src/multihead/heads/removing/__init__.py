"""What would be lost without a head, and taking it out for good."""
