"""What the records say: pages, tables, comparisons."""
