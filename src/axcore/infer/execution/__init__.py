"""The steps of an engine on the device: chunks packed into rows, compiled programs, and copies of decoding state."""
