"""The best columns for every row: search with an upper bound over all draws."""
