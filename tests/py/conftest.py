"""CP_ATTN_REQUIRE=torch,diffusers: where one of these is missing, the run fails instead of skipping its tests.

torch gets one thread: where ranks are threads, more than one for each would wait for each other most of the time.
"""

import importlib.util
import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure():
    for name in filter(None, os.environ.get("CP_ATTN_REQUIRE", "").split(",")):
        if importlib.util.find_spec(name) is None:
            raise pytest.UsageError(f"CP_ATTN_REQUIRE names {name}, which is not installed")
