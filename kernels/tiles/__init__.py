"""Which tile each kernel takes on each chip: literal tables, to be reviewed row by row beside proof/budgets.csv."""
