"""A trained model as a function of its decoding state and the new tokens of some rows."""
