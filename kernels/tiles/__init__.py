"""Tiles of each kernel on each chip: literal tables, to be reviewed row by row beside proof/budgets.csv."""
