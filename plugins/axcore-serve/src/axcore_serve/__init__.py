"""An OpenAI-compatible HTTP server for models of axcore."""
