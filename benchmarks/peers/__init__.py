"""What others offer for the same work, set up as their own documentation says."""
