"""Several matrices that share rows or columns, as one joint matrix."""
