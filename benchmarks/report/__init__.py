"""Pages, tables and comparisons made of the records."""
