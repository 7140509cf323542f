"""Device scalars and NaN on their way into floats and JSON."""

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.telemetry.scalars import as_float, as_json, numbers


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), jnp.float32(2), jnp.bfloat16(2), jnp.int32(2)],
)
def test_any_single_number_becomes_a_float(value):
    assert as_float(value) == 2.0 and type(as_float(value)) is float
    assert as_json(value) == 2.0
    assert numbers({"x": value}) == {"x": 2.0}


def test_only_single_numbers_are_picked_from_a_record():
    values = {
        "kept": jnp.float32(1.5),
        "flag": True,
        "none": None,
        "name": "rda",
        "list": [1],
        "pair": (1, 2),
        "set": frozenset({1}),
        "map": {"a": 1},
        "array": np.ones(2),
    }
    assert numbers(values) == {"kept": 1.5, "flag": 1.0}


def test_what_json_cannot_hold_becomes_null_or_text():
    values = {
        0: math.nan,
        "inf": [math.inf, -math.inf, 1.0],
        "device": jnp.float32(jnp.nan),
        "array": np.array([1.0, np.nan]),
        "bool": np.bool_(True),
        "set": frozenset({3}),
        "path": pathlib.PurePosixPath("a/b"),
    }
    assert json.loads(json.dumps(as_json(values), allow_nan=False)) == {
        "0": None,
        "inf": [None, None, 1.0],
        "device": None,
        "array": [1.0, None],
        "bool": True,
        "set": [3],
        "path": "a/b",
    }
