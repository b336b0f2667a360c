"""Drafts from earlier requests, for engines of axcore."""
