"""Small random models of the planned classes, with inputs: `make(name, uneven)`."""

import diffusers
import torch

SMALL = dict(num_layers=2, attention_head_dim=16, num_attention_heads=4)
JOINT = SMALL | dict(patch_size=1, in_channels=4, num_single_layers=2, joint_attention_dim=24)
VIDEO = SMALL | dict(
    patch_size=(1, 2, 2),
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=32,
    ffn_dim=32,
    cross_attn_norm=True,
)
LTX = SMALL | dict(in_channels=4, out_channels=4, attention_head_dim=8, cross_attention_dim=32, caption_channels=16)


def flux(randn, uneven):
    model = diffusers.FluxTransformer2DModel(**JOINT, pooled_projection_dim=20, axes_dims_rope=[4, 4, 8])
    image, text = (15, 7) if uneven else (16, 8)
    return model, dict(
        hidden_states=randn(2, image, 4),
        encoder_hidden_states=randn(2, text, 24),
        pooled_projections=randn(2, 20),
        img_ids=randn(image, 3),
        txt_ids=randn(text, 3),
        timestep=torch.tensor([0.3, 0.9]),
    )


def flux2(randn, uneven):
    model = diffusers.Flux2Transformer2DModel(**JOINT, timestep_guidance_channels=32, axes_dims_rope=[4, 4, 4, 4])
    image, text = (15, 7) if uneven else (16, 8)
    return model, dict(
        hidden_states=randn(1, image, 4),
        encoder_hidden_states=randn(1, text, 24),
        img_ids=randn(1, image, 4),
        txt_ids=randn(1, text, 4),
        timestep=torch.tensor([0.3]),
        guidance=torch.ones(1),
    )


def video_inputs(randn, uneven, side=8):
    frames, side = (3, 10) if uneven else (2, side)  # 75 rows, or 32
    return dict(
        hidden_states=randn(1, 4, frames, side, side),
        encoder_hidden_states=randn(1, 6, 16),
        timestep=torch.tensor([7]),
    )


def wan(randn, uneven):
    return diffusers.WanTransformer3DModel(**VIDEO, rope_max_seq_len=32), video_inputs(randn, uneven)


def wan_tokens(randn, uneven):
    """Wan with a timestep for every row."""
    model, inputs = wan(randn, uneven)
    return model, inputs | dict(timestep=torch.arange(75 if uneven else 32)[None] % 11)


def chronoedit(randn, uneven):
    model = diffusers.ChronoEditTransformer3DModel(
        **VIDEO,
        image_dim=None,
        added_kv_proj_dim=None,
        pos_embed_seq_len=None,
        rope_max_seq_len=64,
        rope_temporal_skip_len=8,
    )
    return model, video_inputs(randn, uneven) | dict(encoder_hidden_states_image=None)


def qwenimage(randn, uneven):
    model = diffusers.QwenImageTransformer2DModel(
        **SMALL, patch_size=2, in_channels=16, out_channels=4, joint_attention_dim=16, axes_dims_rope=(8, 4, 4)
    )
    side, text = (5, 13) if uneven else (4, 8)
    return model, dict(
        hidden_states=randn(2, side * side, 16),
        encoder_hidden_states=randn(2, text, 16),
        timestep=torch.tensor([0.3, 0.9]),
        img_shapes=[(1, side, side)] * 2,
    )


def ltx(randn, uneven):
    side, text = (5, 13) if uneven else (4, 8)
    return diffusers.LTXVideoTransformer3DModel(**LTX), dict(
        hidden_states=randn(2, 2 * side * side, 4),
        encoder_hidden_states=randn(2, text, 16),
        timestep=torch.tensor([7, 3]),
        encoder_attention_mask=None,
        num_frames=2,
        height=side,
        width=side,
    )


def ltx2(randn, uneven, rope_type="interleaved"):
    model = diffusers.LTX2VideoTransformer3DModel(
        **LTX,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=4,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=16,
        rope_double_precision=False,
        rope_type=rope_type,
    )
    _, inputs = ltx(randn, uneven)
    return model, inputs | dict(
        audio_hidden_states=randn(2, 9, 4),
        audio_encoder_hidden_states=randn(2, 11, 16),
        timestep=torch.tensor([7.0, 3.0]),
        audio_num_frames=9,
        fps=25.0,
    )


def ltx2_split(randn, uneven):
    """LTX2 with its rotary angles split by heads."""
    return ltx2(randn, uneven, "split")


def helios(randn, uneven, **more):
    model = diffusers.HeliosTransformer3DModel(**VIDEO, rope_dim=(4, 4, 4), **more)
    inputs = video_inputs(randn, uneven, side=16)  # 212 rows with the history
    _, _, frames, side, _ = inputs["hidden_states"].shape
    return model, inputs | dict(
        indices_hidden_states=torch.arange(frames)[None],
        indices_latents_history_short=torch.ones(1, 1, dtype=torch.long),
        indices_latents_history_mid=torch.ones(1, 1, dtype=torch.long),
        indices_latents_history_long=torch.ones(1, 4, dtype=torch.long),
        latents_history_short=randn(1, 4, 1, side, side),
        latents_history_mid=randn(1, 4, 1, side, side),
        latents_history_long=randn(1, 4, 4, side, side),
    )


def helios_amplified(randn, uneven):
    """Helios with the keys of its history scaled up."""
    return helios(randn, uneven, is_amplify_history=True)


def minimax(randn, uneven):
    model = diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=6,
        text_dim=8,
        freq_dim=8,
        time_embed_hidden_dim=24,
        time_embed_dim=16,
        rope_freq_dim=2,
    )
    text, audio, video = 4, 6, 9 if uneven else 10
    total = text + audio + video
    rows = torch.arange(total)
    tags = torch.tensor([1] * text + [2] * audio + [0] * video)
    return model, dict(
        hidden_states=randn(2, video, 16),
        audio_hidden_states=randn(2, audio, 6),
        encoder_hidden_states=randn(2, text, 8),
        timestep=torch.tensor([0.7, 0.3]),
        timestep_indices=(tags == 2).long(),
        token_tags=tags,
        position_ids=torch.stack([rows, rows % 4, rows % 2], 1).float(),
        text_indices=rows[:text],
        audio_indices=rows[text : text + audio],
        video_indices=rows[text + audio :],
    )


MODELS = {
    f.__name__: f
    for f in (
        flux,
        flux2,
        wan,
        wan_tokens,
        chronoedit,
        qwenimage,
        ltx,
        ltx2,
        ltx2_split,
        helios,
        helios_amplified,
        minimax,
    )
}


def make(name, uneven=False):
    """Return (model, inputs), the same on every rank."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    model, inputs = MODELS[name](randn, uneven)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)  # or its branch would be dead
    return model.eval(), inputs


def tensors(output):
    """Return the tensors of a model's output in order."""
    values = output.values() if hasattr(output, "values") else output
    return [output] if torch.is_tensor(output) else [x for x in values if x is not None]
