"""What every head does over a whole corpus."""
