"""What is timed: groups of cases."""
