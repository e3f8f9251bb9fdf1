"""Arrays with three and more axes."""
