"""Other packages' implementations of the same work, set up by their documentation."""
