"""Plans for the planned diffusers models, made for the model at hand. They take the place of the class's own.

Where a tensor is cut is the model's business: at the root where the streams arrive as rows, at the first block where
the model still has to build its rows. What belongs to rows (rotary angles, masks, per-row timesteps, ControlNet
residuals) is cut like them.
"""

from .plan import ContextParallelInput, ContextParallelOutput, LocalTail


def _rows(dim, dims=None):
    return ContextParallelInput(split_dim=dim, expected_dims=dims)


def _out(dim, dims):
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=True)


_STATES = _rows(1, 3)  # (batch, rows, channels)
_GATHER = ContextParallelOutput(gather_dim=1, expected_dims=3)


def _flux(model):
    return {
        "": {
            "hidden_states": _STATES,
            "encoder_hidden_states": _STATES,
            "img_ids": _rows(-2),  # with or without a batch dim
            "txt_ids": _rows(-2),
            "controlnet_block_samples": _STATES,
            "controlnet_single_block_samples": _STATES,
        },
        "proj_out": _GATHER,
    }


def _flux2(model):
    return {
        "": {
            "hidden_states": _STATES,
            "encoder_hidden_states": _STATES,
            "img_ids": _rows(-2),
            "txt_ids": _rows(-2),
        },
        "proj_out": _GATHER,
    }


def _wan(model):
    # Text stays whole: cross-attention of the rank's rows with all of it needs no exchange.
    return {
        "": {"timestep": _rows(1, 2)},
        "rope": {0: _out(1, 4), 1: _out(1, 4)},
        "blocks.0": {"hidden_states": _STATES},
        "proj_out": _GATHER,
    }


def _qwen_image(model):
    return {
        "": {"controlnet_block_samples": _STATES},
        "pos_embed": {0: _out(0, 2), 1: _out(0, 2)},
        "transformer_blocks.0": {"hidden_states": _STATES, "encoder_hidden_states": _STATES},
        "transformer_blocks.*": {"modulate_index": _rows(1, 2), "encoder_hidden_states_mask": _rows(1, 2)},
        "proj_out": _GATHER,
    }


def _ltx(model):
    return {
        "": {
            "hidden_states": _STATES,
            "encoder_hidden_states": _STATES,
            "encoder_attention_mask": _rows(1, 2),
            "timestep": _rows(1, 2),
        },
        "rope": {0: _out(1, 3), 1: _out(1, 3)},
        "proj_out": _GATHER,
    }


def _ltx2(model):
    # Audio stays whole on every rank. Angles are (batch, rows, channels), or (batch, heads, rows, channels) where
    # they are split by heads.
    angles = _out(2, 4) if getattr(model.rope, "rope_type", "") == "split" else _out(1, 3)
    return {
        "": {
            "hidden_states": _STATES,
            "encoder_hidden_states": _STATES,
            "encoder_attention_mask": _rows(1, 2),
            "timestep": _rows(1, 2),
            "video_self_attention_mask": _rows(2, 3),  # (batch, all queries, own keys)
            "video_keyframes_mask": _rows(1, 3),
        },
        "rope": {0: angles, 1: angles},
        "cross_attn_rope": {0: angles, 1: angles},
        "proj_out": _GATHER,
    }


def _helios(model):
    # The model itself cuts its rows into history and present between the layers, so each layer cuts and gathers.
    plan = {
        "blocks.*.attn1": {
            "original_context_length": LocalTail(of="hidden_states", dim=1),
            "hidden_states": _STATES,
            "rotary_emb": _STATES,
        },
        "blocks.*.attn2": {"hidden_states": _STATES},
        "blocks.*.ffn": {"hidden_states": _STATES},
    }
    for i in range(len(model.blocks)):
        plan.update({f"blocks.{i}.{layer}": _GATHER for layer in ("attn1", "attn2", "ffn")})
    return plan


def _minimax_h3(model):
    return {
        "rope": {0: _out(0, 2), 1: _out(0, 2)},
        "transformer_blocks.0": {"hidden_states": _STATES},
        "transformer_blocks.*": {"adaln_indices": _rows(0, 1)},
        "norm_out": {"timestep_indices": _rows(0, 1)},
        "proj_out": _GATHER,
        "audio_proj_out": _GATHER,
    }


_PLANS = {
    "ChronoEditTransformer3DModel": _wan,
    "Flux2Transformer2DModel": _flux2,
    "FluxTransformer2DModel": _flux,
    "HeliosTransformer3DModel": _helios,
    "LTX2VideoTransformer3DModel": _ltx2,
    "LTXVideoTransformer3DModel": _ltx,
    "MiniMaxH3Transformer3DModel": _minimax_h3,
    "QwenImageTransformer2DModel": _qwen_image,
    "WanTransformer3DModel": _wan,
}


def _diffusers_class(model, names):
    """Return the diffusers class of a model, or of what it derives from, that is among `names`."""
    for cls in type(model).__mro__:
        if cls.__module__.partition(".")[0] == "diffusers" and cls.__name__ in names:
            return cls
    return None


def plan_for(model):
    """Return the plan of a model: cp_attn's for a planned diffusers model, else its `_cp_plan`.

    A `_cp_plan` that a subclass or a user has put in the place of diffusers' own is honoured.
    """
    plan = getattr(model, "_cp_plan", None)
    cls = _diffusers_class(model, _PLANS)
    if cls is not None and plan is vars(cls).get("_cp_plan"):
        return _PLANS[cls.__name__](model)
    if plan is None:
        raise ValueError(f"no plan: {type(model).__name__} has no _cp_plan, and no cp_plan was passed")
    return plan


def refusal(model, arguments):
    """Return why a call of a model with these arguments {name: value} cannot be split, or None."""
    if _diffusers_class(model, ("FluxTransformer2DModel", "Flux2Transformer2DModel")) is None:
        return None
    if (arguments.get("joint_attention_kwargs") or {}).get("attention_mask") is not None:
        return "joint_attention_kwargs['attention_mask'] is not implemented with context parallelism"
    if arguments.get("kv_cache_mode") is not None:
        return f"kv_cache_mode={arguments['kv_cache_mode']!r} is not implemented with context parallelism"
    return None
