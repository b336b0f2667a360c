"""Which tokens of which sequences the next step computes, and where their keys and values are. Plain Python without
JAX."""
