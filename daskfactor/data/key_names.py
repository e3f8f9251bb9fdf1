"""Names that columns of keys usually have, and columns that are labels of rows."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.errors import DataWarning

_ROWS = (
    r"rows?|i|users?|customers?|readers?|members?|visitors?|sessions?|accounts?|person|subjects?|"
    r"patients?|cells?|barcodes?|docs?|documents?|obs|samples?|source"
)
_COLUMNS = (
    r"col|cols|columns?|j|items?|products?|movies?|films?|songs?|tracks?|artists?|books?|pages?|"
    r"words?|terms?|genes?|features?|vars?|variables?|target"
)
_MARK = r"[\W_]*(?:id|ids|key|index|idx|name|no)"
"""What names of keys end with."""
_LABELS = (
    r"rows?|ids?|index|names?|number|no|nr|code|year|date|time|month|week|day|hour|station|site|"
    r"plot|genotype|strain|line|zip|zip_?code|postcode|wavelength|user|customer|reader|member|"
    r"person|subject|patient|cell|barcode|doc|document|obs|sample|item|product|gene|feature|"
    r"participant|respondent|case|record|time_?stamp|run|experiment"
)
"""What columns of labels are called: in the singular, for plurals are rather counted."""
_LABEL_MARK = (
    r"(?:.+[\W_](?i:id|ids|key|index|idx|name|no|nr|code)|.+(?:Id|ID|Key|Index|No|Nr|Code))"
)
_RATINGS = r"(?:.+[\W_])?(?:ratings?|stars?)|scores?|grades?|half_?stars?"
"""What values are called that nobody has given where there are none."""
_TIMES = r"(?:.*[\W_])?(?:time_?stamp|date|datetime)|time"
_TYPE = r":(?:token|float)(?:_seq)?$"
"""What RecBole writes behind the names of columns."""
FEWEST_LABELS = 3
"""Rows from which on whole numbers without a repeat say something."""


def names_of_keys(row: str, column: str) -> bool:
    """Whether two columns are called as keys of rows and of columns usually are."""
    row, column = (re.sub(_TYPE, "", name) for name in (row, column))
    usual = [
        re.fullmatch(f"(?:{known})(?:{_MARK})?", name, re.IGNORECASE) is not None
        for known, name in ((_ROWS, row), (_COLUMNS, column))
    ]
    marked = all(re.fullmatch(f".+{_MARK}", name, re.IGNORECASE) for name in (row, column))
    return all(usual) or (marked and any(usual))


def holds_ids(name: str, values: NDArray[Any]) -> bool:
    """Whether a column is called as labels are, and holds a whole number once for each row."""
    known = f"(?i:{_LABELS})|{_LABEL_MARK}"
    if len(values) < FEWEST_LABELS or not re.fullmatch(known, name.strip()):
        return False
    numbers = np.asarray(values, np.float64)
    whole = np.isfinite(numbers).all() and np.array_equal(numbers, np.rint(numbers))
    return bool(whole and np.unique(numbers).size == numbers.size)


def is_time(name: str) -> bool:
    """Return whether the name of a column is that of times."""
    return re.fullmatch(_TIMES, re.sub(_TYPE, "", name).strip(), re.IGNORECASE) is not None


def taken_for_labels(where: str, name: str) -> None:
    """Say that a column of numbers is taken for labels."""
    warn(
        f"the first column of {where}, {name!r}, holds a whole number for each row and none twice, "
        "and is taken for the labels of rows; if it is data, give it another name",
        DataWarning,
    )


def usual_meaning(names: Sequence[str]) -> str:
    """What a line that a table of entries does not have means, by what its values are called."""
    values = re.sub(_TYPE, "", names[2]).strip() if len(names) > 2 else ""
    rated = re.fullmatch(_RATINGS, values, re.IGNORECASE)
    return "missing" if rated else "zero"
