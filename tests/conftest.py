"""What all tests here share: the interpreter switch, fixtures, what is left out without a GPU."""

from shared_fixtures import *  # noqa: F403
