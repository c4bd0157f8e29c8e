"""Pages, tables and comparisons from records."""
