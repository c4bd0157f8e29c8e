"""Tables of the tiles of each kernel on each chip, for review next to proof/budgets.csv."""
