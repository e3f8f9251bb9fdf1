"""What `tests.fingerprints` calls equal; a case that fails is compared with nothing."""

import json

import numpy as np
import pytest

from tests import fingerprints
from tests.fingerprints import REFUSAL, judge, run_case


def drawn(value=1.0):
    return run_case("draws", lambda: {"W": np.full(3, value)})


def broken():
    raise ZeroDivisionError("nothing ran")


FAILED = run_case("draws", broken)
REFUSED = run_case(f"draws{REFUSAL}", broken)
FORMER = {"error": FAILED["error"]}  # as files had it that did not tell refusals apart


def test_equal_arrays_are_equal():
    assert judge(drawn(), drawn()).kind == "equal"
    assert judge(drawn(), drawn(2.0)).kind == "different"


@pytest.mark.parametrize("old", [drawn(), FAILED, REFUSED, FORMER])
def test_a_case_that_fails_is_a_difference(old):
    assert judge(old, FAILED).kind == "different"


@pytest.mark.parametrize("old", [FAILED, REFUSED, FORMER])
def test_a_refusal_must_say_the_same(old):
    assert judge(old, REFUSED).kind == "equal"
    other = REFUSED | {"error": "ZeroDivisionError: other words"}
    for one, another in ((old, other), (old, drawn()), (drawn(), REFUSED)):
        assert judge(one, another).kind == "different"


def test_files_with_one_error_are_not_the_same(tmp_path, capsys):
    for name, entry, code in (("failed", FAILED, 1), ("refused", REFUSED, 0)):
        path = tmp_path / f"{name}.json"
        record = {"only": "", "machine": {}, "cases": {"draws": entry}}
        path.write_text(json.dumps(record), encoding="utf-8")
        assert fingerprints.compare(path, path) == code
        assert f"{code} cases failed" in capsys.readouterr().out
