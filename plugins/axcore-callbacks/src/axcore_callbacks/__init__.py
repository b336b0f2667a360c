"""Early stopping and averages of the parameters."""
