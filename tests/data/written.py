"""Text files that tests write, and the labels that are read of them."""


def written(folder, name, text):
    """Write a text file, and return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def names_of(data):
    """Return labels of rows and of columns; None where there are none."""
    labels = data.labels
    pairs = (labels.row_coords, labels.row_dim), (labels.col_coords, labels.col_dim)
    return [None if dim not in coords else coords[dim].tolist() for coords, dim in pairs]
