"""The Muon optimizer for axcore."""
