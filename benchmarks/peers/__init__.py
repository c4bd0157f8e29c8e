"""Other packages' ways to do the same work, set up as their own documentation says."""
