"""An input source that reads documents from a SQLite table, for axcore."""
