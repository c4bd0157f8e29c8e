"""Tables of the tiles of each kernel on each chip, to be reviewed next to proof/budgets.csv."""
