"""What heads are for, as far as controlled probes can tell."""
