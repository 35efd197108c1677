"""The wrapping of diffusers' backends, without ranks."""

from types import SimpleNamespace

import pytest

pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch  # noqa: E402

from cp_attn.models import dispatch, processors  # noqa: E402

Registry = attention_dispatch._AttentionBackendRegistry


class Mark(dispatch.Marker):
    def attend(self, arguments, backend):
        return [*sorted(arguments), backend]


@pytest.fixture
def installed():
    before = dict(Registry._backends), dict(Registry._supported_arg_names), set(Registry._supports_context_parallel)
    dispatch.install()
    yield
    dispatch.uninstall()
    assert (Registry._backends, Registry._supported_arg_names, Registry._supports_context_parallel) == before


def small_backend(query, key, value, scale=None):
    return query, key, value, scale


def call(parallel_config, backend, **more):
    return attention_dispatch.dispatch_attention_fn(1, 2, 3, backend=backend, parallel_config=parallel_config, **more)


def test_every_argument_arrives(installed):
    for backend in Registry.list_backends():
        seen = call(Mark(), backend, attn_mask=4, is_causal=True, enable_gqa=True)
        assert {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"} <= set(seen)
        assert seen[-1] == dispatch.name_of(backend)


def test_other_calls_go_on_as_before(monkeypatch):
    backend = attention_dispatch.AttentionBackendName.XFORMERS
    monkeypatch.setitem(Registry._backends, backend, small_backend)
    monkeypatch.setitem(Registry._supported_arg_names, backend, {"query", "key", "value", "scale"})
    dispatch.install()
    try:
        assert call(None, backend, scale=0.5, is_causal=True) == (1, 2, 3, 0.5)
    finally:
        dispatch.uninstall()
    assert Registry._backends[backend] is small_backend


def test_a_backend_registered_later(monkeypatch):
    backend = attention_dispatch.AttentionBackendName.XFORMERS
    for table in (Registry._backends, Registry._supported_arg_names, Registry._constraints):
        monkeypatch.setitem(table, backend, table[backend])  # put back afterwards
    dispatch.install()
    try:
        Registry.register(backend)(small_backend)
        dispatch.refresh()
        assert "key" in call(Mark(), backend) and call(None, backend) == (1, 2, 3, None)
    finally:
        dispatch.uninstall()
    assert Registry._backends[backend] is small_backend


def test_arguments_without_a_place():
    dispatch.check({"query": 1, "dropout_p": 0.0, "window_size": None})
    for name in ("dropout_p", "window_size"):
        with pytest.raises(ValueError, match=name):
            dispatch.check({"query": 1, name: 0.5})


def test_two_models_one_wrapping(installed):
    wrapped = dict(Registry._backends)
    dispatch.install()
    assert Registry._backends == wrapped
    dispatch.uninstall()
    assert Registry._backends == wrapped


def test_another_build_of_diffusers(monkeypatch):
    dispatch.registry.cache_clear()
    monkeypatch.delattr(Registry, "_supported_arg_names")
    with pytest.raises(RuntimeError, match="diffusers .* lacks _supported_arg_names"):
        dispatch.registry()


TAKEN = {
    "cpu": ["native", "_native_math", "_native_flash"],
    "cuda": [
        *("native", "_native_math", "_native_flash", "_native_efficient", "_native_cudnn"),
        *("flash", "flash_hub", "flash_varlen_hub", "_flash_3_hub", "_flash_3_varlen_hub", "sage", "sage_hub"),
    ],
}


@pytest.mark.parametrize("device", TAKEN)
def test_backends_of_a_device(device):
    """These pass; any other that diffusers has is refused with the names that would do."""
    taken = []
    for backend in Registry._backends:
        modules = [("blocks.0", SimpleNamespace(processor=SimpleNamespace(_attention_backend=backend)))]
        try:
            processors.check_backends(object(), modules, device)
            taken.append(dispatch.name_of(backend))
        except ValueError as error:
            assert f"'blocks.0' of object uses the backend '{dispatch.name_of(backend)}'" in str(error)
            assert str(error).endswith(f"cannot run on {device}; compatible ones are {', '.join(TAKEN[device])}")
    assert sorted(taken) == sorted(TAKEN[device])


def test_other_devices_are_refused():
    modules = [("blocks.0", SimpleNamespace(processor=SimpleNamespace(_attention_backend="native")))]
    with pytest.raises(ValueError, match="cannot run on xpu; cp_attn runs on cpu and cuda only"):
        processors.check_backends(object(), modules, "xpu")
