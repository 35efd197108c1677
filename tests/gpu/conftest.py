"""The suite for machines with GPUs: it runs where they are, and says why where they are not."""

import importlib.util
import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")


def missing(count):
    """Return why there are not `count` GPUs for cp_attn, or None."""
    if importlib.util.find_spec("cp_attn._cuda") is None:
        return "cp_attn was built without CUDA (CP_ATTN_CUDA=1 demands it)"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    if torch.cuda.device_count() < count:
        return f"needs {count} GPUs, and there are {torch.cuda.device_count()}"
    return None


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(count): needs so many GPUs")


def pytest_runtest_setup(item):
    for mark in item.iter_markers("gpus"):
        reason = missing(*mark.args)
        if reason:
            pytest.skip(reason)


def pytest_report_header():
    return f"GPUs: {missing(1) or ', '.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))}"
