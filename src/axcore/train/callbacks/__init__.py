"""What watches a run: writers, progress, reports."""
