"""HTML reports about runs."""
