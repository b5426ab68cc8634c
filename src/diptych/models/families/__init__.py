"""Every family as data: one entry each, in `table` all of them."""
