"""CP_ATTN_REQUIRE=torch,diffusers: where one of these is missing, the run fails instead of skipping its tests."""

import importlib
import os

import pytest


def pytest_configure():
    for name in filter(None, os.environ.get("CP_ATTN_REQUIRE", "").split(",")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise pytest.UsageError(f"CP_ATTN_REQUIRE names {name}, which cannot be imported: {error}") from error
